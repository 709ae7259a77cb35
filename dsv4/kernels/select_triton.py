"""Select in one or two launches: long score rows are narrowed chunk by chunk, what is left is ranked exactly.

Legend: T tokens, N entries, K picks, F rows of a tile, G columns of a tile (groups of F entries).

A tile of [F, G] scores is narrowed by the maxima of its G groups: at least K entries reach the K-th largest of them,
and few more do. So one pass of F maxima, a search over G values and one compaction leave at most 2 K candidates, in
ascending order, without a search over the tile itself. The exact search runs over candidates alone.

Scores are searched as int32 keys in their order. Pivots only steer; what is picked is a function of the scores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import field, frozen
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.base import SelectKernel
from dsv4.kernels.triton_launch import KernelVariant
from dsv4.metadata.plans import ScoreInputs, SelectOutput

NEG_INF: tl.constexpr = tl.constexpr(-2139095041)
"""Key of -inf, the lowest of all scores."""
VECTOR: tl.constexpr = tl.constexpr(4)
"""Scores of a 16-byte load."""
RUN_LENGTH = 8
RUN: tl.constexpr = tl.constexpr(RUN_LENGTH)
"""Consecutive scores of a thread: a whole sector. Each run costs a step of the scan."""
NO_KEY: tl.constexpr = tl.constexpr(-(2**31))
"""Below every key: a lane without an entry."""
LAST_KEY: tl.constexpr = tl.constexpr(2**31 - 1)
NUMBERS = (
    "score_stride", "list_stride", "table_stride", "table_width", "rows_per_page", "base",
    "lane_stride", "first_token", "num_entries", "topk", "most", "chunk", "direct",
)  # fmt: skip
"""Runtime integers: they change from batch to batch, so they never select a compiled kernel."""


@frozen(kw_only=True)
class SelectTiles:
    """Sizes of the compiled kernels, powers of two."""

    fold: int = 8
    """F: 8 halves the candidates against one group per thread; beyond it the bound gets no tighter."""
    lanes: int = 256
    """One thread each. Groups, eight a thread, are at least twice the picks, or the K-th largest maximum bounds little."""
    small: tuple[int, ...] = (2048, 4096)
    """Candidates that the exact search takes: two full lists of Flash, of Pro."""
    narrow_warps: int = 8
    """32 scores a thread: two programs share an SM's registers."""
    small_warps: int = 4
    scan: int = field(default=4096)
    """Entries a step of the kernel for more picks than a tile can bound."""

    @property
    def block(self) -> int:
        """Entries of a tile: a row longer than this is cut."""
        return self.fold * self.groups

    @property
    def groups(self) -> int:
        return RUN_LENGTH * self.lanes


@frozen(kw_only=True)
class SelectPlan:
    """Launches for one capacity: `chunks` programs a row narrow, one finishes."""

    chunks: int
    small: int
    narrow: bool
    """Whether the finishing program may have to narrow once more."""
    direct: int
    """Rows with at most this many visible entries are read by the finishing program alone."""


def plan_select(tiles: SelectTiles, num_entries: int, topk: int) -> SelectPlan:
    """From capacities alone: captured launches serve every batch."""
    small, largest = tiles.small[0], tiles.small[-1]
    chunks = -(-num_entries // tiles.block) if num_entries > max(tiles.block, largest) else 0
    candidates = chunks * 2 * topk if chunks else num_entries
    if candidates > largest:
        return SelectPlan(chunks=chunks, small=small, narrow=True, direct=tiles.block)
    small = next(size for size in tiles.small if size >= candidates)
    return SelectPlan(chunks=chunks, small=small, narrow=False, direct=small)


@triton.jit
def _ordered(x):
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x):
    """int32 in the order of the scores: NaN as -inf, -0 as 0."""
    return _ordered(tl.where(x == x, x, float("-inf")) + 0.0)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _log2(x):
    """To 0.01, for positive normal x: guesses need no more, and steps are short."""
    bits = x.to(tl.int32, bitcast=True)
    part = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return (bits >> 23).to(tl.float32) + part * (2.0 - part * 0.33333334)


@triton.jit
def _guess(low, high, above_low, above_high, wanted, curved, CURVES: tl.constexpr):
    """Key at which `wanted` scores should be reached, on a line through the bounds; `curved`: through the logarithms
    of their counts, which is how a tail falls. Any key may come out."""
    top, bottom = above_low.to(tl.float32), above_high.to(tl.float32)
    if CURVES:
        top = tl.where(curved, _log2(top + 0.5), top)
        bottom = tl.where(curved, _log2(bottom + 0.5), bottom)
        wanted = tl.where(curved, _log2(wanted + 0.5), wanted)
    start = _value(low)
    return _ordered(start + (_value(high) - start) * ((top - wanted) / (top - bottom)))


@triton.jit
def _bracket(
    x, low, high, above_low, above_high, topk, most, CURVES: tl.constexpr, FLOAT: tl.constexpr
):
    """Tighten keys low < high until topk..most values reach low (`above_low`) or nothing lies between the two.

    Before and after: at least topk reach low, fewer reach high. Each step counts at two pivots in one reduction, a
    guess and the middle, which bounds the steps by 32 whatever the values are. x holds scores (FLOAT) or keys.
    CURVES: every other guess is curved, the first one too.
    """
    wanted = (topk + most).to(tl.float32) * 0.5
    curved = low == low
    while (above_low > most) & (high - 1 > low):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        guess = _guess(low, high, above_low, above_high, wanted, curved, CURVES)
        guess = tl.where((guess > low) & (guess < high), guess, middle)
        first, second = tl.minimum(guess, middle), tl.maximum(guess, middle)
        if FLOAT:
            reach_first, reach_second = x >= _value(first), x >= _value(second)
        else:
            reach_first, reach_second = x >= first, x >= second
        counts = tl.sum(reach_first.to(tl.int32) + (reach_second.to(tl.int32) << 16))
        count_first, count_second = counts & 0xFFFF, (counts >> 16) & 0xFFFF
        above_low = tl.where(
            count_second >= topk,
            count_second,
            tl.where(count_first >= topk, count_first, above_low),
        )
        low = tl.where(count_second >= topk, second, tl.where(count_first >= topk, first, low))
        above_high = tl.where(
            count_first < topk,
            count_first,
            tl.where(count_second < topk, count_second, above_high),
        )
        high = tl.where(count_first < topk, first, tl.where(count_second < topk, second, high))
        curved = curved == 0
    return low, high, above_low, above_high


@triton.jit
def _first_ties(
    x, there, low, high, above_high, thread, step, topk, most, BLOCK: tl.constexpr
):  # fmt: skip
    """1 for what reaches high and for the first lanes that reach low: as many as make topk..most; else 0."""
    better = x >= _value(high)
    # no comparison sees the NaN that ties with -inf
    equal = there & (better == 0) & ((x >= _value(low)) | (low == NEG_INF))
    near, end = 0, BLOCK
    ties = tl.sum(equal.to(tl.int32))
    while ties + above_high > most:
        middle = (near + end) // 2
        count = tl.sum((equal & (step < middle - thread)).to(tl.int32))
        enough = count + above_high >= topk
        near = tl.where(enough, near, middle)
        end = tl.where(enough, middle, end)
        ties = tl.where(enough, count, ties)
    return tl.where(better | (equal & (step < end - thread)), 1.0, 0.0)


@triton.jit
def _halves(taken, FOLD: tl.constexpr, LANES: tl.constexpr):
    """Taken entries of each thread's run [FOLD / 2, LANES]: the tile's first rows in the low half of an int32, its last
    in the high one, so that one scan ranks both."""
    counts = tl.reshape(tl.sum(taken.to(tl.int32), axis=1), [2, FOLD // 2, LANES])
    return tl.sum(counts << (tl.arange(0, 2) * 16)[:, None, None], axis=0)


@triton.jit
def _ranks(taken, halves, total, FOLD: tl.constexpr, LANES: tl.constexpr):
    """Number of taken entries up to each one, in the order of entries."""
    flat = tl.reshape(halves, [FOLD // 2 * LANES])
    before = tl.reshape(tl.cumsum(flat, axis=0), [FOLD // 2, LANES]) - halves
    # the high half goes on where the low one ends
    before += (total & 0xFFFF) << 16
    before = (before[None, :, :] >> (tl.arange(0, 2) * 16)[:, None, None]) & 0xFFFF
    before = tl.reshape(before, [FOLD, LANES])[:, None, :]
    first = (tl.arange(0, RUN) == 0)[None, :, None]
    return tl.cumsum(taken.to(tl.int32) + tl.where(first, before, 0), axis=1)


@triton.jit
def _by_thread(loaded, FOLD: tl.constexpr, LANES: tl.constexpr):
    """[row, load, thread, vector] -> [row, run, thread]; no value changes its thread."""
    return tl.reshape(tl.permute(loaded, (0, 1, 3, 2)), [FOLD, RUN, LANES])


@triton.jit
def _narrow(
    row_ptr, list_ptr, out_ptr, first, end, listed, topk, most,
    ALIGN: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write topk..most candidates, among them the topk best, of the lanes [first, end); -1 behind them.

    Lane n is entry n of the score row, or, if `listed`, the entry that the list holds there. Both orders ascend. The
    output may overwrite lanes of the list up to this tile's own.
    """
    BLOCK: tl.constexpr = FOLD * LANES * RUN
    # A thread holds a run of each row. A lane is a constant plus its thread's share: no register holds it, and
    # scattered stores need no other layout.
    row, thread = tl.arange(0, FOLD) * (LANES * RUN), first + tl.arange(0, LANES) * RUN
    run = tl.arange(0, RUN // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    loaded, load_thread = row[:, None, None, None] + run[None, :, None, :], thread[None, None, :, None]
    step = row[:, None, None] + tl.arange(0, RUN)[None, :, None]
    thread = thread[None, None, :]
    if listed:
        entry = tl.load(list_ptr + (load_thread + loaded), mask=loaded < end - load_thread, other=-1)
        x = tl.load(row_ptr + entry, mask=entry >= 0, other=float("-inf"))
        x = _by_thread(x, FOLD, LANES)
    else:
        # a mask of whole vectors keeps the loads wide; the row's capacity is one of them
        vectors = (end + ALIGN - 1) // ALIGN * ALIGN
        inside = loaded < vectors - load_thread
        x = tl.load(row_ptr + (load_thread + loaded), mask=inside, other=float("-inf"))
        x = _by_thread(x, FOLD, LANES)
        if end - first < BLOCK:
            x = tl.where(step < end - thread, x, float("-inf"))
    maxima = _key(tl.max(x, axis=0))
    lowest, highest = tl.min(maxima), tl.max(maxima) + 1
    groups = tl.full([], LANES * RUN, tl.int32)
    none = tl.full([], 0, tl.int32)
    low, _, _, _ = _bracket(
        maxima, lowest, highest, groups, none, topk, topk + topk // 4, CURVES=False, FLOAT=False
    )
    floor = _value(low)
    halves = _halves(x >= floor, FOLD, LANES)
    total = tl.sum(halves)
    count = (total & 0xFFFF) + (total >> 16)
    if (count > most) | (low == NEG_INF):
        # a comparison with -inf counts lanes without an entry and misses NaN
        count = tl.where(low == NEG_INF, BLOCK, count)
        low, high, count, above_high = _bracket(
            x, low, highest, count, none, topk, most, CURVES=True, FLOAT=True
        )
        floor = _value(low)
        if (count > most) | (low == NEG_INF):
            there = step < end - thread
            if listed:
                entry = tl.load(
                    list_ptr + (load_thread + loaded), mask=loaded < end - load_thread, other=-1
                )
                there = _by_thread(entry, FOLD, LANES) >= 0
            x = _first_ties(
                x, there, low, high, above_high, thread - first, step, topk, most, BLOCK
            )  # fmt: skip
            floor = 1.0
        halves = _halves(x >= floor, FOLD, LANES)
        total = tl.sum(halves)
        count = (total & 0xFFFF) + (total >> 16)
    taken = x >= floor
    rank = _ranks(taken, halves, total, FOLD, LANES)
    lane = thread + step
    if listed:
        entry = tl.load(list_ptr + (load_thread + loaded), mask=loaded < end - load_thread, other=-1)
        lane = _by_thread(entry, FOLD, LANES)
        # every thread has read its part of the list before another overwrites it
        tl.debug_barrier()
    tl.store(out_ptr - 1 + rank, lane, mask=taken)
    behind = tl.arange(0, LANES * RUN)
    tl.store(out_ptr + behind, -1, mask=(behind >= count) & (behind < most))


@triton.jit
def _exact(row_ptr, list_ptr, end, listed, topk, SMALL: tl.constexpr):
    """Write the topk best of the lanes [0, end) over the list, ascending. More than topk entries are there."""
    lane = tl.arange(0, SMALL)
    if listed:
        entry = tl.load(list_ptr + lane, mask=lane < end, other=-1)
    else:
        entry = tl.where(lane < end, lane, -1)
    there = entry >= 0
    key = _key(tl.load(row_ptr + entry, mask=there, other=0.0))
    low = tl.min(tl.where(there, key, LAST_KEY), axis=0)
    key = tl.where(there, key, NO_KEY)
    high = tl.max(key, axis=0) + 1
    total = tl.sum(there.to(tl.int32))
    none = tl.full([], 0, tl.int32)
    low, high, _, above_high = _bracket(key, low, high, total, none, topk, topk, CURVES=True, FLOAT=False)
    better = key >= high
    equal = (key >= low) & (key < high)
    packed = (better.to(tl.int32) << 16) + equal.to(tl.int32)
    before = tl.cumsum(packed, axis=0) - packed
    ties, room = before & 0xFFFF, topk - above_high
    taken = better | (equal & (ties < room))
    tl.debug_barrier()
    tl.store(list_ptr + (before >> 16) + tl.minimum(ties, room), entry, mask=taken)
    tl.debug_barrier()


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
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    visible = tl.minimum(tl.load(visible_ptr + first_token + token), num_entries)
    first = chunk * (FOLD * LANES * RUN)
    if (visible <= direct) | (visible <= topk) | (visible <= first):
        return
    row_ptr = scores_ptr + tl.multiple_of(token * score_stride, ALIGN)
    out_ptr = lists_ptr + token * list_stride + chunk * most
    end = tl.minimum(visible, first + FOLD * LANES * RUN)
    if end - first > most:
        _narrow(
            row_ptr, out_ptr, out_ptr, first, end, False, topk, most, ALIGN, FOLD, LANES
        )  # fmt: skip
    else:
        lane = tl.arange(0, LANES * RUN)
        tl.store(out_ptr + lane, tl.where(first + lane < end, first + lane, -1), mask=lane < most)


@triton.jit(do_not_specialize=NUMBERS)
def _finish_kernel(
    scores_ptr, score_stride, visible_ptr, slot_ptr, lists_ptr, list_stride,
    table_ptr, table_stride, table_width, rows_per_page, base,
    lane_ptr, lane_stride, indices_ptr,
    first_token, num_entries, topk, most, chunk, direct,
    ALIGN: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr, SMALL: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    tile_token = tl.program_id(0).to(tl.int64)
    token = first_token + tile_token
    visible = tl.minimum(tl.load(visible_ptr + token), num_entries)
    row_ptr = scores_ptr + tl.multiple_of(tile_token * score_stride, ALIGN)
    list_ptr = lists_ptr + tile_token * list_stride
    if visible > topk:
        listed = visible > direct
        end = tl.where(listed, tl.cdiv(visible, chunk) * most, visible)
        if NARROW:
            while end > SMALL:
                kept = 0
                for first in range(0, end, FOLD * LANES * RUN):
                    _narrow(
                        row_ptr, list_ptr, list_ptr + kept, first, tl.minimum(end, first + FOLD * LANES * RUN),
                        listed, topk, most, ALIGN, FOLD, LANES,
                    )  # fmt: skip
                    kept += most
                tl.debug_barrier()
                end = kept
                listed = end > 0
        _exact(row_ptr, list_ptr, end, listed, topk, SMALL)
    # where all visible entries are picked, nothing was written
    written = tl.where(visible > topk, topk, 0)
    slot = tl.maximum(tl.load(slot_ptr + token), 0).to(tl.int64)
    for first in range(0, topk, LANES * RUN):
        pick = first + tl.arange(0, LANES * RUN)
        there = (pick < topk) & (pick < visible)
        entry = tl.load(list_ptr + pick, mask=pick < written, other=0)
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
            count += tl.sum(((_key(x) >= middle) & (entry < visible)).to(tl.int32))
        low, above_low = tl.where(count < topk, low, middle), tl.where(count < topk, above_low, count)
        high = tl.where(count < topk, middle, high)
        above_high = tl.where(count < topk, count, above_high)
    room = topk - above_high
    better_before, equal_before = 0, 0
    for first in range(0, tl.maximum(visible, topk), BLOCK):
        entry = first + tl.arange(0, BLOCK)
        there = entry < visible
        key = _key(tl.load(row_ptr + entry, mask=there, other=0.0))
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
    list_stride = max(plan.chunks, 1) * 2 * topk
    _check_scratch(output.scratch, num_tokens * list_stride, topk)
    scores = (scores_TN, scores_TN.stride(0), inputs.num_visible_T)
    lists = (output.scratch, list_stride)
    common = {
        "first_token": first, "num_entries": num_entries, "topk": topk, "most": 2 * topk,
        "direct": plan.direct,
        "ALIGN": _align(scores_TN), "FOLD": tiles.fold, "LANES": tiles.lanes,
    }  # fmt: skip
    if plan.chunks:
        grid = (num_tokens, plan.chunks)
        _narrow_kernel[grid](*scores, *lists, **common, num_warps=tiles.narrow_warps)
    _finish_kernel[(num_tokens,)](
        *scores, inputs.slot_T, *lists, *_targets(output), chunk=tiles.block, **common,
        SMALL=plan.small, NARROW=plan.narrow,
        num_warps=tiles.narrow_warps if plan.narrow else tiles.small_warps,
    )  # fmt: skip


def _scan(
    tiles: SelectTiles, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, first: int
) -> None:
    num_tokens, num_entries = scores_TN.shape
    _scan_kernel[(num_tokens,)](
        scores_TN, scores_TN.stride(0), inputs.num_visible_T, inputs.slot_T, *_targets(output),
        first, num_entries, output.lane_TK.shape[1],
        BLOCK=tiles.scan, num_warps=tiles.narrow_warps,
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
    whole = scores_TN.stride(0) % 4 == 0 and scores_TN.shape[1] % 4 == 0
    return 4 if whole and scores_TN.data_ptr() % 16 == 0 else 1


def _check_scratch(scratch: Tensor, need: int, topk: int) -> None:
    if scratch.numel() < need:
        raise KernelError(
            f"select: scratch {scratch.numel()} int32 lanes, {need} needed for {topk} picks; "
            "size it with dsv4.metadata.buffers.select_scratch"
        )


def variants() -> tuple[KernelVariant, ...]:
    """The kernels for the published dims: 512 picks (Flash) and 1,024 (Pro)."""
    tiles = SelectTiles()
    pointers = {"scores_ptr": "*fp32"} | dict.fromkeys(
        ("visible_ptr", "slot_ptr", "lists_ptr", "table_ptr", "lane_ptr", "indices_ptr"), "*i32"
    )
    sizes = {"ALIGN": 4, "FOLD": tiles.fold, "LANES": tiles.lanes}

    def variant(name: str, fn: Any, warps: int, more: dict[str, Any]) -> KernelVariant:
        signature = pointers | dict.fromkeys(NUMBERS, "i32")
        return KernelVariant(
            name=name,
            fn=fn,
            signature={key: kind for key, kind in signature.items() if key in fn.arg_names},
            constexprs=sizes | more,
            num_warps=warps,
            aligned=tuple(key for key in pointers if key in fn.arg_names),
        )

    return (
        variant("select narrow", _narrow_kernel, tiles.narrow_warps, {}),
        variant(
            "select narrow and finish",
            _finish_kernel,
            tiles.narrow_warps,
            {"SMALL": tiles.small[0], "NARROW": True},
        ),
        *(
            variant(
                f"select finish {small}",
                _finish_kernel,
                tiles.small_warps,
                {"SMALL": small, "NARROW": False},
            )
            for small in tiles.small
        ),
    )
