"""Select in one or two launches: chunks of long score rows leave candidates, one program a row picks among them.

Legend: T tokens, N entries, K picks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.base import SelectKernel
from dsv4.kernels.select_tiles_triton import NEG_INF, RUN, SCORES, best, score_key
from dsv4.kernels.triton_launch import KernelVariant
from dsv4.metadata.plans import ScoreInputs, SelectOutput

PICKS: tl.constexpr = tl.constexpr(4)
"""Picks of a thread."""
LAST_KEY: tl.constexpr = tl.constexpr(2**31 - 1)
"""What no score reaches."""
RUN_LENGTH, VECTOR = int(RUN.value), int(SCORES.value)
SM_REGISTERS = 65536
"""On NVIDIA."""
NUMBERS = (
    "score_stride", "list_stride", "table_stride", "table_width", "rows_per_page", "base",
    "lane_stride", "first_token", "num_entries", "topk", "most", "chunk", "direct",
)  # fmt: skip
"""Runtime integers: they change from batch to batch, so they never select a compiled kernel."""


@frozen(kw_only=True)
class SelectTiles:
    """Sizes of the compiled kernels, powers of two. Few threads with much work: a step of a search costs each warp the
    same, however little it counts."""

    lanes: int = 256
    """Threads of a program that narrows. Its groups, RUN a thread, are at least twice the picks, or the K-th largest
    maximum bounds little."""
    fold: int = 8
    """Entries of a group: 64 scores in a thread's registers leave room for two programs on an SM."""
    list_fold: int = 4
    """The same of a tile that narrows lists, whose entries take registers too."""
    small_lanes: int = 128
    small: tuple[int, ...] = (2048, 4096)
    """Candidates that an exact search takes: two full lists of Flash, of Pro. The last: at least as many as groups."""
    scan: int = 4096
    """Entries a step of the kernel for more picks than a tile can bound."""

    @property
    def groups(self) -> int:
        return self.lanes * RUN_LENGTH

    @property
    def block(self) -> int:
        """Entries of a chunk: longer rows are cut."""
        return self.groups * self.fold


@frozen(kw_only=True)
class SelectPlan:
    """Launches for one capacity: `chunks` programs a row narrow, then one finishes."""

    chunks: int
    direct: int
    """Rows with at most this many visible entries are read by the finishing program alone."""
    lanes: int
    fold: int
    """Rows of the tile that the finishing program narrows lists with, 0 = never."""
    small: int
    """Rows of its tile of candidates."""


def plan_select(tiles: SelectTiles, num_entries: int, topk: int) -> SelectPlan:
    """From capacities alone: captured launches serve every batch."""
    largest = tiles.small[-1]
    chunks = -(-num_entries // tiles.block) if num_entries > largest else 0
    candidates = chunks * 2 * topk if chunks else num_entries
    fits = [size for size in tiles.small if size >= candidates]
    size = fits[0] if fits else largest
    lanes, fold = (tiles.small_lanes, 0) if fits else (tiles.lanes, tiles.list_fold)
    return SelectPlan(
        chunks=chunks, direct=size, lanes=lanes, fold=fold, small=size // (lanes * RUN_LENGTH)
    )


@triton.jit
def _rows(entry, there, table_ptr, table_width, rows_per_page, base):
    """Table rows of entries, -1 where there is none."""
    logical = tl.minimum(entry // rows_per_page, table_width - 1)
    page = tl.load(table_ptr + logical, mask=there, other=-1)
    return tl.where(page >= 0, base + page * rows_per_page + entry % rows_per_page, -1)


@triton.jit(do_not_specialize=NUMBERS)
def _narrow_kernel(
    scores_ptr, score_stride, visible_ptr, lists_ptr, list_stride,
    first_token, num_entries, topk, most, direct,
    ALIGN: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Candidates of one chunk of one row."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    visible = tl.minimum(tl.load(visible_ptr + first_token + token), num_entries)
    first = chunk * (FOLD * LANES * RUN)
    if (visible <= direct) | (visible <= topk) | (visible <= first):
        return
    row_ptr = scores_ptr + tl.multiple_of(token * score_stride, ALIGN)
    out_ptr = (
        lists_ptr + tl.multiple_of(token * list_stride, 4) + tl.multiple_of(chunk * most * 2, 4)
    )
    end = tl.minimum(visible, first + FOLD * LANES * RUN)
    best(row_ptr, out_ptr, out_ptr, first, end, False, topk, most, ALIGN, FOLD, LANES, True, False)


@triton.jit(do_not_specialize=NUMBERS)
def _finish_kernel(
    scores_ptr, score_stride, visible_ptr, slot_ptr, lists_ptr, picks_ptr, list_stride,
    table_ptr, table_stride, table_width, rows_per_page, base,
    lane_ptr, lane_stride, indices_ptr,
    first_token, num_entries, topk, most, chunk, direct,
    ALIGN: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """The picks of one row, from its lists or from its scores; then the rows of the picks."""
    tile_token = tl.program_id(0).to(tl.int64)
    token = first_token + tile_token
    visible = tl.minimum(tl.load(visible_ptr + token), num_entries)
    row_ptr = scores_ptr + tl.multiple_of(tile_token * score_stride, ALIGN)
    picks_ptr += tile_token * list_stride
    list_ptr = lists_ptr + tl.multiple_of(tile_token * list_stride, 4)
    if visible > topk:
        listed = visible > direct
        end = tl.where(listed, tl.cdiv(visible, chunk) * most, visible)
        if FOLD:
            while listed & (end > SMALL * LANES * RUN):
                kept = 0
                for first in range(0, end, FOLD * LANES * RUN):
                    best(
                        row_ptr, list_ptr, list_ptr + tl.multiple_of(kept * 2, 4),
                        first, tl.minimum(end, first + FOLD * LANES * RUN), True, topk, most,
                        ALIGN, FOLD, LANES, True, True,
                    )  # fmt: skip
                    kept += most
                tl.debug_barrier()
                end = kept
        best(
            row_ptr, list_ptr, picks_ptr, 0, end, listed, topk, topk,
            ALIGN, SMALL, LANES, False, True,
        )  # fmt: skip
        tl.debug_barrier()
    # where all visible entries are picked, nothing was written
    written = tl.where(visible > topk, topk, 0)
    slot = tl.maximum(tl.load(slot_ptr + token), 0).to(tl.int64)
    for first in range(0, topk, LANES * PICKS):
        pick = first + tl.arange(0, LANES * PICKS)
        there = (pick < topk) & (pick < visible)
        entry = tl.load(picks_ptr + pick, mask=pick < written, other=0)
        entry = tl.where(pick < written, entry, pick)
        row = _rows(
            entry, there, table_ptr + slot * table_stride, table_width, rows_per_page, base
        )  # fmt: skip
        lane = tl.load(lane_ptr + token * lane_stride + pick, mask=pick < topk, other=0)
        tl.store(indices_ptr + lane, row, mask=pick < topk)


@triton.jit(do_not_specialize=NUMBERS)
def _scan_kernel(
    scores_ptr, score_stride, visible_ptr, slot_ptr,
    table_ptr, table_stride, table_width, rows_per_page, base,
    lane_ptr, lane_stride, indices_ptr, first_token, num_entries, topk,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For any number of picks: bisect on the key, reading the row once a step, then once more for the picks."""
    tile_token = tl.program_id(0).to(tl.int64)
    token = first_token + tile_token
    visible = tl.minimum(tl.load(visible_ptr + token), num_entries)
    row_ptr = scores_ptr + tile_token * score_stride
    table_ptr += tl.maximum(tl.load(slot_ptr + token), 0).to(tl.int64) * table_stride
    lane_ptr += token * lane_stride
    # all visible entries reach the key of -inf, none the last
    low = tl.full([], NEG_INF, tl.int32)
    high = tl.full([], LAST_KEY, tl.int32)
    above_low, above_high = visible, visible * 0
    while (above_low > topk) & (high - 1 > low):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = 0
        for first in range(0, visible, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + entry, mask=entry < visible, other=0.0)
            count += tl.sum(((score_key(x) >= middle) & (entry < visible)).to(tl.int32))
        low, above_low = (
            tl.where(count < topk, low, middle),
            tl.where(count < topk, above_low, count),
        )
        high = tl.where(count < topk, middle, high)
        above_high = tl.where(count < topk, count, above_high)
    room = topk - above_high
    better_before, equal_before = 0, 0
    for first in range(0, tl.maximum(visible, topk), BLOCK):
        entry = first + tl.arange(0, BLOCK)
        there = entry < visible
        key = score_key(tl.load(row_ptr + entry, mask=there, other=0.0))
        better, equal = there & (key >= high), there & (key >= low) & (key < high)
        ties = equal_before + tl.cumsum(equal.to(tl.int32), axis=0) - equal.to(tl.int32)
        rank = better_before + tl.cumsum(better.to(tl.int32), axis=0) - better.to(tl.int32)
        better_before += tl.sum(better.to(tl.int32))
        equal_before += tl.sum(equal.to(tl.int32))
        taken = better | (equal & (ties < room))
        row = _rows(entry, taken, table_ptr, table_width, rows_per_page, base)
        lane = tl.load(lane_ptr + rank + tl.minimum(ties, room), mask=taken, other=0)
        tl.store(indices_ptr + lane, row, mask=taken)
        # the lanes that no entry is left for
        unused = (entry >= visible) & (entry < topk)
        lane = tl.load(lane_ptr + entry, mask=unused, other=0)
        tl.store(indices_ptr + lane, -1, mask=unused)


class TritonSelect(SelectKernel):
    def __init__(self, tiles: SelectTiles | None = None) -> None:
        self.tiles = tiles or SelectTiles()

    def select(
        self, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, *, first_token: int
    ) -> None:
        topk = output.lane_TK.shape[1]
        if topk == 0 or scores_TN.shape[0] == 0:
            return
        if 2 * topk > self.tiles.groups:
            _scan(self.tiles, scores_TN, inputs, output, first_token)
        else:
            _select(self.tiles, scores_TN, inputs, output, first_token)


def _select(
    tiles: SelectTiles, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, first: int
) -> None:
    (num_tokens, num_entries), topk = scores_TN.shape, output.lane_TK.shape[1]
    plan = plan_select(tiles, num_entries, topk)
    list_stride = _list_stride(output.scratch, num_tokens, plan.chunks, topk)
    lists = output.scratch.view(torch.float32)
    scores = (scores_TN, scores_TN.stride(0), inputs.num_visible_T)
    numbers = {
        "first_token": first, "num_entries": num_entries, "topk": topk, "most": 2 * topk,
        "direct": plan.direct, "ALIGN": _align(scores_TN),
    }  # fmt: skip
    if plan.chunks:
        _narrow_kernel[num_tokens, plan.chunks](
            *scores, lists, list_stride, **numbers,
            FOLD=tiles.fold, LANES=tiles.lanes, **_options(tiles.lanes, scores_TN, paired=True),
        )  # fmt: skip
    _finish_kernel[num_tokens,](
        *scores, inputs.slot_T, lists, output.scratch, list_stride, *_targets(output), **numbers,
        chunk=tiles.block, FOLD=plan.fold, LANES=plan.lanes, SMALL=plan.small,
        **_options(plan.lanes, scores_TN),
    )  # fmt: skip


def _list_stride(scratch: Tensor, num_tokens: int, chunks: int, topk: int) -> int:
    """int32 lanes of a row: lists of 2 K candidates of two words, or K picks alone."""
    stride = chunks * 4 * topk if chunks else topk
    if scratch.numel() < num_tokens * stride:
        raise KernelError(
            f"select: scratch {scratch.numel()} int32 lanes, {num_tokens * stride} needed for "
            f"{topk} picks of {num_tokens} tokens; size it with dsv4.metadata.buffers.select_scratch"
        )
    return stride


def _options(lanes: int, scores_TN: Tensor, *, paired: bool = False) -> dict[str, int]:
    """One thread a lane; paired: two programs share an SM's registers."""
    if torch.version.hip:
        return {"num_warps": max(lanes // 64, 1)}
    options = {"num_warps": max(lanes // 32, 1)}
    if paired and scores_TN.is_cuda:
        options["maxnreg"] = min(SM_REGISTERS // (2 * lanes), 255)
    return options


def _scan(
    tiles: SelectTiles, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, first: int
) -> None:
    num_tokens, num_entries = scores_TN.shape
    _scan_kernel[(num_tokens,)](
        scores_TN, scores_TN.stride(0), inputs.num_visible_T, inputs.slot_T, *_targets(output),
        first, num_entries, output.lane_TK.shape[1],
        BLOCK=tiles.scan, **_options(tiles.lanes, scores_TN),
    )  # fmt: skip


def _targets(output: SelectOutput) -> tuple[Tensor | int, ...]:
    """Arguments for the translation to rows and for where they go."""
    rows, lane_TK = output.rows, output.lane_TK
    table = rows.block_table
    return (
        table, table.stride(0), table.shape[1], rows.rows_per_page, rows.base,
        lane_TK, lane_TK.stride(0), output.stream.indices_N,
    )  # fmt: skip


def _align(scores_TN: Tensor) -> int:
    """Scores of one load: four where every row starts at a multiple of 16 bytes and ends with one."""
    whole = scores_TN.stride(0) % VECTOR == 0 and scores_TN.shape[1] % VECTOR == 0
    return VECTOR if whole and scores_TN.data_ptr() % 16 == 0 else 1


def variants() -> tuple[KernelVariant, ...]:
    """The kernels for the published dims, 512 picks (Flash) and 1,024 (Pro), and the one for any number."""
    tiles = SelectTiles()
    widest = tiles.small[-1] // tiles.groups
    return (
        *_variants("narrow", _narrow_kernel, tiles.lanes, FOLD=tiles.fold),
        *_variants(
            "narrow and finish", _finish_kernel, tiles.lanes, FOLD=tiles.list_fold, SMALL=widest
        ),
        *(
            variant
            for size in tiles.small
            for variant in _variants(
                f"finish {size}",
                _finish_kernel,
                tiles.small_lanes,
                FOLD=0,
                SMALL=size // (tiles.small_lanes * RUN_LENGTH),
            )
        ),
        *_variants("scan", _scan_kernel, tiles.lanes, BLOCK=tiles.scan),
    )


def _variants(name: str, fn: Any, lanes: int, **sizes: int) -> list[KernelVariant]:
    """For GPUs with 32 lanes a warp, and with 64."""
    pointers = dict.fromkeys(("scores_ptr", "lists_ptr"), "*fp32") | dict.fromkeys(
        ("visible_ptr", "slot_ptr", "picks_ptr", "table_ptr", "lane_ptr", "indices_ptr"), "*i32"
    )
    kinds = pointers | dict.fromkeys(NUMBERS, "i32")
    constexprs = {"ALIGN": VECTOR, "LANES": lanes} | sizes
    return [
        KernelVariant(
            name=f"select {name}",
            fn=fn,
            signature={arg: kind for arg, kind in kinds.items() if arg in fn.arg_names},
            constexprs={arg: value for arg, value in constexprs.items() if arg in fn.arg_names},
            num_warps=lanes // warp_lanes,
            aligned=tuple(arg for arg in pointers if arg in fn.arg_names),
            targets=targets,
        )
        for warp_lanes, targets in ((32, ("sm_90", "sm_100")), (64, ("gfx942", "gfx950")))
    ]
