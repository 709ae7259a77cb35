"""Select by narrowing: launches that leave few candidates of long score rows, then one that picks among them exactly.

Legend: T tokens, N entries, K picks, F rows of a tile, C columns (a thread each) of vectors of 4 scores.

The K-th largest of the maxima of G >= 2 K groups is a bound that at least K scores reach, and of mixed data few more.
So a tile is narrowed by a search over G maxima and one compaction in ascending order, to at most 2 K candidates.
Launches follow each other on the stream: no program reads what it wrote itself.

A candidate is int64: bits of the score, then the entry. Its lists are in ascending entry order.
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
from dsv4.metadata.plans import ScoreInputs, SelectOutput
from dsv4.triton_launch import KernelVariant

NO_KEY: tl.constexpr = tl.constexpr(-(2**31))
"""Below every key: a lane without a score."""
LOWEST: tl.constexpr = tl.constexpr(-2139095041)
"""Key of -inf, and of NaN."""
EMPTY: tl.constexpr = tl.constexpr(-1)
"""A candidate whose score is NaN, which no true one is: a lane without one."""
LAST: tl.constexpr = tl.constexpr(2**31 - 1)
VECTOR = 4
"""Scores of a 16-byte load."""
MAX_REGISTERS = 65536
"""Of an SM. Two narrowing programs share them, so that one computes while the other loads."""
NUMBERS = (
    "score_stride", "item_stride", "list_stride", "table_stride", "table_width", "base", "lane_stride",
    "first_token", "num_entries", "topk", "level",
)  # fmt: skip
"""Runtime integers: they change from batch to batch, so they never select a compiled kernel."""


@frozen(kw_only=True)
class SelectTiles:
    """Sizes of the compiled kernels, powers of two."""

    tile: int = 16384
    """Scores of a narrowing program, in registers."""
    columns: tuple[int, ...] = (256, 512)
    """Its threads: the first with at least twice as many groups, VECTOR a thread, as picks. The K-th largest of fewer
    maxima bounds little."""
    direct: int = 8192
    """Rows shorter than this are not narrowed: the scratch may be too short for their candidates."""
    block: int = 2048
    """Candidates that the picking program reads at once, at least."""
    most_block: int = 4096
    """Candidates that it keeps in registers, at most."""
    pick_lanes: int = 256

    def columns_for(self, topk: int) -> int:
        """0 = too many picks to narrow for."""
        return next((columns for columns in self.columns if VECTOR * columns >= 2 * topk), 0)


@triton.jit
def _key(x):
    """int32 in the order of the scores: NaN as -inf, -0 as 0."""
    bits = (tl.where(x == x, x, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, above, below, wanted):
    """Pivots first <= second in (low, high): where `wanted` keys should be reached if scores lay evenly; and halfway,
    which bounds the steps whatever the scores are."""
    start, end = _value(low), _value(high)
    guess = _key(start + (end - start) * ((above - wanted) / (above - below)))
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    guess = tl.where((guess > low) & (guess < high), guess, middle)
    return tl.minimum(guess, middle), tl.maximum(guess, middle)


@triton.jit
def _closer(low, high, above, below, first, second, reach_first, reach_second, topk):
    """Bounds after counting the keys that reach each pivot: at least topk reach low (`above`), fewer high (`below`)."""
    enough, plenty = reach_first >= topk, reach_second >= topk
    return (
        tl.where(plenty, second, tl.where(enough, first, low)),
        tl.where(enough, tl.where(plenty, high, second), first),
        tl.where(plenty, reach_second, tl.where(enough, reach_first, above)),
        tl.where(enough, tl.where(plenty, below, reach_second), reach_first),
    )


@triton.jit
def _flags(key, first, second):
    """Whether each pivot is reached, in the two halves of an int32: one sum counts both."""
    return (key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16)


@triton.jit
def _end(visible, topk, level, TILE: tl.constexpr):
    """Scores of a row, or the lanes of its candidates behind `level` narrowing launches."""
    for _ in range(level):
        visible = tl.cdiv(visible, TILE) * (2 * topk)
    return visible


@triton.jit
def _score(item):
    return (item >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _bound(maxima, topk):
    """A score that at least topk of the maxima reach, and few more; -inf if there is no other."""
    key = _key(maxima)
    low, high = tl.min(key), tl.max(key) + 1
    above, below = topk * 0 + key.shape[0], topk * 0
    while (above > topk + topk // 8) & (high - 1 > low):
        first, second = _pivots(low, high, above, below, topk * 1.0625)
        reached = tl.sum(_flags(key, first, second))
        low, high, above, below = _closer(
            low, high, above, below, first, second, reached & 0xFFFF, reached >> 16, topk
        )
    return _value(low)


@triton.jit
def _exactly(x, place, there, topk):
    """x with NaN in all but topk to 2 topk of the best, and -inf for the NaN among these. For many equals, or many of
    the best in few groups: bisect the tile itself on (score, then lower place)."""
    key = tl.where(there, _key(x), NO_KEY)
    low, high = tl.full([], LOWEST, tl.int64) << 32, tl.full([], LAST, tl.int64) << 32
    count = _total(there)
    while count > 2 * topk:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = _total(_reaches(key, place, middle))
        low, high = tl.where(reached < topk, low, middle), tl.where(reached < topk, middle, high)
        count = tl.where(reached < topk, count, reached)
    return tl.where(_reaches(key, place, low), _value(key), float("nan"))


@triton.jit
def _total(flags):
    return tl.sum(tl.sum(tl.sum(flags.to(tl.int32), axis=2), axis=0))


@triton.jit
def _reaches(key, place, pivot):
    at, last = (pivot >> 32).to(tl.int32), LAST - (pivot & LAST).to(tl.int32)
    return (key > at) | ((key == at) & (place <= last))


@triton.jit
def _counts(x, bound, F: tl.constexpr, C: tl.constexpr):
    """Scores of [F, C, 4] that reach the bound, thread by thread in pairs of 16 bits: [F / 2, C], row f low, row
    f + F / 2 high. In fp32, where a compare that gives 1.0 and an add are two instructions."""
    x0, x1, x2, x3 = _quarters(x, F, C)
    num = tl.where(x0 >= bound, 1.0, 0.0) + tl.where(x1 >= bound, 1.0, 0.0)
    num += tl.where(x2 >= bound, 1.0, 0.0) + tl.where(x3 >= bound, 1.0, 0.0)
    num = (
        tl.reshape(num, [2, F // 2, C])
        * tl.where(tl.arange(0, 2) == 0, 1.0, 65536.0)[:, None, None]
    )
    return tl.sum(num, axis=0).to(tl.int32)


@triton.jit
def _quarters(x, F: tl.constexpr, C: tl.constexpr):
    """x [F, C, 4] as four [F * C], a thread keeping its own: a scatter of all lanes in one would move them all."""
    even, odd = tl.split(tl.reshape(x, [F, C, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (
        tl.reshape(first, [F * C]), tl.reshape(second, [F * C]),
        tl.reshape(third, [F * C]), tl.reshape(fourth, [F * C]),
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _narrow_kernel(
    scores_ptr, score_stride, items_ptr, item_stride, visible_ptr, lists_ptr, list_stride,
    first_token, num_entries, topk, level,
    LISTED: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One tile of one row: its at least topk, at most 2 topk best, in ascending order; lanes behind them are empty."""
    TILE: tl.constexpr = F * C * 4
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    visible = tl.minimum(tl.load(visible_ptr + first_token + token), num_entries)
    end = _end(visible, topk, level, TILE)
    first = chunk * TILE
    if (visible <= topk) | (end <= first):
        return
    place = first + tl.arange(0, TILE)
    items_ptr += token * item_stride
    if not LISTED:
        row_ptr = scores_ptr + tl.multiple_of(token * score_stride, ALIGN)
        # whole vectors: rows are padded to them
        x = tl.load(row_ptr + place, mask=place // ALIGN < tl.cdiv(end, ALIGN), other=float("nan"))
        if end - first < TILE:
            x = tl.where(place < end, x, float("nan"))
    else:
        x = _score(tl.load(items_ptr + place, mask=place < end, other=EMPTY))
    x = tl.reshape(x, [F, C, 4])

    bound = _bound(tl.reshape(tl.max(x, axis=0), [4 * C]), topk)
    counts = _counts(x, bound, F, C)
    totals = tl.sum(counts, axis=1)
    count = tl.sum((totals & 0xFFFF) + (totals >> 16))
    if (count > 2 * topk) | (bound == float("-inf")):
        spot = tl.reshape(first + tl.arange(0, TILE), [F, C, 4])
        if not LISTED:
            x = _exactly(x, spot, spot < end, topk)
        else:
            x = _exactly(x, spot, x == x, topk)
        bound = float("-inf")
        counts = _counts(x, bound, F, C)
        totals = tl.sum(counts, axis=1)
        count = tl.sum((totals & 0xFFFF) + (totals >> 16))

    half = tl.arange(0, 2) * 16
    totals = tl.reshape((totals[None, :] >> half[:, None]) & 0xFFFF, [F])
    before = tl.cumsum(counts, axis=1) - counts
    before = tl.reshape((before[None, :, :] >> half[:, None, None]) & 0xFFFF, [F, C])
    before += (tl.cumsum(totals, axis=0) - totals)[:, None]
    rank = tl.reshape(before, [F * C])
    list_ptr = lists_ptr + token * list_stride + chunk.to(tl.int64) * (2 * topk)
    scores = _quarters(x, F, C)
    vector = tl.arange(0, F * C) * 4
    for i in tl.static_range(4):
        at = first + vector + i
        taken = scores[i] >= bound
        if not LISTED:
            item = (scores[i].to(tl.int32, bitcast=True).to(tl.int64) << 32) | at
        else:
            item = tl.load(items_ptr + at, mask=taken, other=EMPTY)
        tl.store(list_ptr + rank, item, mask=taken)
        rank += taken.to(tl.int32)
    for behind in range(0, 2 * topk, 4 * C):
        lane = behind + tl.arange(0, 4 * C)
        tl.store(list_ptr + lane, EMPTY, mask=(lane >= count) & (lane < 2 * topk))


@triton.jit
def _block(row_ptr, items_ptr, lane, end, LISTED: tl.constexpr):
    """Keys and entries of lanes of a row or of its candidates."""
    if not LISTED:
        x = tl.load(row_ptr + lane, mask=lane < end, other=0.0)
        return tl.where(lane < end, _key(x), NO_KEY), lane
    item = tl.load(items_ptr + lane, mask=lane < end, other=EMPTY)
    x = _score(item)
    return tl.where(x == x, _key(x), NO_KEY), item.to(tl.int32)


@triton.jit
def _store_rows(
    entry, pick, there, mask, table_ptr, table_width, base, lane_ptr, indices_ptr, PAGE: tl.constexpr
):  # fmt: skip
    logical = tl.minimum(entry // PAGE, table_width - 1)
    page = tl.load(table_ptr + logical, mask=there, other=-1)
    row = tl.where(page >= 0, base + page * PAGE + entry % PAGE, -1)
    tl.store(indices_ptr + tl.load(lane_ptr + pick, mask=mask, other=0), row, mask=mask)


@triton.jit(do_not_specialize=NUMBERS)
def _pick_kernel(
    scores_ptr, score_stride, items_ptr, item_stride, visible_ptr, slot_ptr,
    table_ptr, table_stride, table_width, base, lane_ptr, lane_stride, indices_ptr,
    first_token, num_entries, topk, level,
    LISTED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The picks of one row, as rows of the table. WHOLE: a block holds all; else the row is read once a step."""
    tile_token = tl.program_id(0).to(tl.int64)
    token = first_token + tile_token
    visible = tl.minimum(tl.load(visible_ptr + token), num_entries)
    row_ptr, items_ptr = (
        scores_ptr + tile_token * score_stride,
        items_ptr + tile_token * item_stride,
    )
    table_ptr += tl.maximum(tl.load(slot_ptr + token), 0).to(tl.int64) * table_stride
    lane_ptr += token * lane_stride
    lanes = tl.arange(0, BLOCK)
    if visible <= topk:
        for first in range(0, topk, BLOCK):
            pick = first + lanes
            _store_rows(
                pick, pick, pick < visible, pick < topk,
                table_ptr, table_width, base, lane_ptr, indices_ptr, PAGE,
            )  # fmt: skip
        return
    end = _end(visible, topk, level, TILE)
    if WHOLE:
        key, entry = _block(row_ptr, items_ptr, lanes, end, LISTED)
        low, high = tl.min(tl.where(key == NO_KEY, LAST, key)), tl.max(key) + 1
    else:
        low, high = tl.full([], LOWEST, tl.int32), tl.full([], LAST, tl.int32)
    above, below = end, topk * 0
    while (above > topk) & (high - 1 > low):
        pivot, second = _pivots(low, high, above, below, topk + 0.5)
        if WHOLE:
            reached = tl.sum(_flags(key, pivot, second))
            one, two = reached & 0xFFFF, reached >> 16
        else:
            flags = tl.zeros([BLOCK], tl.int32)
            for first in range(0, end, BLOCK):
                key, entry = _block(row_ptr, items_ptr, first + lanes, end, LISTED)
                flags += _flags(key, pivot, second)
            one, two = tl.sum(flags & 0xFFFF), tl.sum(flags >> 16)
        low, high, above, below = _closer(low, high, above, below, pivot, second, one, two, topk)
    # what reaches low but not high is equal, or all of it is picked
    room = topk - below
    better_before, equal_before = 0, 0
    for first in range(0, end, BLOCK):
        if not WHOLE:
            key, entry = _block(row_ptr, items_ptr, first + lanes, end, LISTED)
        better, equal = key >= high, (key >= low) & (key < high)
        flags = better.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(flags, axis=0) - flags
        ties = equal_before + (before >> 16)
        taken = better | (equal & (ties < room))
        _store_rows(
            entry, better_before + (before & 0xFFFF) + tl.minimum(ties, room), taken, taken,
            table_ptr, table_width, base, lane_ptr, indices_ptr, PAGE,
        )  # fmt: skip
        if not WHOLE:
            reached = tl.sum(flags)
            better_before += reached & 0xFFFF
            equal_before += reached >> 16


class TritonSelect(SelectKernel):
    def __init__(self, tiles: SelectTiles | None = None) -> None:
        self.tiles = tiles or SelectTiles()

    def select(
        self, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, *, first_token: int
    ) -> None:
        (num_tokens, num_entries), topk = scores_TN.shape, output.lane_TK.shape[1]
        if topk == 0 or num_tokens == 0:
            return
        tiles, rows, lane_TK = self.tiles, output.rows, output.lane_TK
        columns = tiles.columns_for(topk)
        launches = _launches(tiles, num_entries, topk)
        free = _items(output.scratch, num_tokens * sum(launches) * 2 * topk)
        scores = (scores_TN, scores_TN.stride(0))
        numbers = {"first_token": first_token, "num_entries": num_entries, "topk": topk}
        items, stride = free, 0
        for level, chunks in enumerate(launches):
            lists, width = free, chunks * 2 * topk
            _narrow_kernel[num_tokens, chunks](
                *scores, items, stride, inputs.num_visible_T, lists, width, **numbers, level=level,
                LISTED=level > 0, ALIGN=_align(scores_TN), F=tiles.tile // (VECTOR * columns), C=columns,
                **_options(columns, 2, scores_TN.device),
            )  # fmt: skip
            items, stride, free = lists, width, free[num_tokens * width :]
        table, length = rows.block_table, stride or num_entries
        whole = length <= tiles.most_block
        _pick_kernel[num_tokens,](
            *scores, items, stride, inputs.num_visible_T, inputs.slot_T,
            table, table.stride(0), table.shape[1], rows.base,
            lane_TK, lane_TK.stride(0), output.stream.indices_N, **numbers, level=len(launches),
            LISTED=bool(launches), TILE=tiles.tile, PAGE=rows.rows_per_page, WHOLE=whole,
            BLOCK=tiles.most_block if whole and length > tiles.block else tiles.block,
            **_options(tiles.pick_lanes, 0, scores_TN.device),
        )  # fmt: skip


def _launches(tiles: SelectTiles, num_entries: int, topk: int) -> list[int]:
    """Programs a row of each narrowing launch: from capacities alone, so that captured launches serve every batch."""
    launches: list[int] = []
    if not tiles.columns_for(topk) or num_entries < tiles.direct:
        return launches
    length = num_entries
    while not launches or length > 4 * topk:
        launches.append(-(-length // tiles.tile))
        length = launches[-1] * 2 * topk
    return launches


def _items(scratch: Tensor, needed: int) -> Tensor:
    """The scratch as int64, from its first aligned lane on."""
    odd = scratch.data_ptr() // 4 % 2
    items = scratch[odd : odd + (scratch.numel() - odd) // 2 * 2].view(torch.int64)
    if items.numel() < needed:
        raise KernelError(
            f"select: scratch {scratch.numel()} int32 lanes, {2 * needed + odd} needed for the candidates; "
            f"size it with dsv4.metadata.buffers.select_scratch"
        )
    return items


def _options(lanes: int, programs: int, device: torch.device) -> dict[str, int]:
    """A thread a lane, and registers for that many programs on an SM."""
    options = {"num_warps": max(lanes // (64 if torch.version.hip else 32), 1)}
    if device.type == "cuda" and not torch.version.hip and programs:
        options["maxnreg"] = min(MAX_REGISTERS // (programs * max(lanes, 32)), 255)
    return options


def _align(scores_TN: Tensor) -> int:
    """Scores of one load: four where every row starts at a multiple of 16 bytes and ends with one."""
    whole = scores_TN.stride(0) % VECTOR == 0 and scores_TN.shape[1] % VECTOR == 0
    return VECTOR if whole and scores_TN.data_ptr() % 16 == 0 else 1


def variants() -> tuple[KernelVariant, ...]:
    """The kernels for the published models: 512 and 1,024 picks, 64 entries a page."""
    tiles = SelectTiles()
    pointers = {"scores_ptr": "*fp32", "items_ptr": "*i64", "lists_ptr": "*i64"} | dict.fromkeys(
        ("visible_ptr", "slot_ptr", "table_ptr", "lane_ptr", "indices_ptr"), "*i32"
    )
    signature = pointers | dict.fromkeys(NUMBERS, "i32")
    pick = {"TILE": tiles.tile, "PAGE": 64}

    def variant(name: str, fn: Any, lanes: int, **sizes: Any) -> list[KernelVariant]:
        return [
            KernelVariant(
                name=f"select {name} {warp}",
                fn=fn,
                signature={key: kind for key, kind in signature.items() if key in fn.arg_names},
                constexprs=sizes,
                num_warps=lanes // warp,
                aligned=tuple(key for key in pointers if key in fn.arg_names),
                targets=targets,
            )
            for warp, targets in ((32, ("sm_90", "sm_100")), (64, ("gfx942", "gfx950")))
        ]

    return (
        *(
            each
            for columns in tiles.columns
            for listed in (False, True)
            for each in variant(
                f"narrow {'lists' if listed else 'rows'} {columns}", _narrow_kernel, columns,
                LISTED=listed, ALIGN=VECTOR, F=tiles.tile // (VECTOR * columns), C=columns,
            )
        ),
        *variant("pick row", _pick_kernel, tiles.pick_lanes, LISTED=False, BLOCK=tiles.block, WHOLE=False, **pick),
        *(
            each
            for listed in (False, True)
            for block in (tiles.block, tiles.most_block)
            for each in variant(
                f"pick {'lists' if listed else 'rows'} {block}", _pick_kernel, tiles.pick_lanes,
                LISTED=listed, BLOCK=block, WHOLE=True, **pick,
            )
        ),
    )  # fmt: skip
