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
from attrs import frozen
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.base import SelectKernel
from dsv4.kernels.triton_launch import KernelVariant
from dsv4.metadata.plans import ScoreInputs, SelectOutput

NEG_INF: tl.constexpr = tl.constexpr(-2139095041)
"""Key of -inf, the lowest of all scores."""
SCORES: tl.constexpr = tl.constexpr(4)
"""Scores of a 16-byte load."""
PICKS: tl.constexpr = tl.constexpr(4)
"""Picks of a thread."""
RUN_LENGTH = 8
RUN: tl.constexpr = tl.constexpr(RUN_LENGTH)
"""Consecutive scores of a thread: a whole sector. Each run costs a step of the scan."""
NO_KEY: tl.constexpr = tl.constexpr(-(2**31))
"""Below every key: a lane without an entry."""
LAST_KEY: tl.constexpr = tl.constexpr(2**31 - 1)
MAX_REGISTERS = 128
"""Of a thread on NVIDIA: two programs of 256 threads share an SM."""
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
    small_lanes: int = 128
    small: tuple[int, ...] = (2048, 4096)
    """Candidates that an exact search alone takes: two full lists of Flash, of Pro."""
    scan: int = 4096
    """Entries a step of the kernel for more picks than a tile can bound."""

    @property
    def groups(self) -> int:
        return self.lanes * RUN_LENGTH

    @property
    def block(self) -> int:
        """Entries of a tile: a row longer than this is cut."""
        return self.groups * self.fold


@frozen(kw_only=True)
class SelectPlan:
    """Launches for one capacity: `chunks` programs a row narrow, one finishes."""

    chunks: int
    direct: int
    """Rows with at most this many visible entries are read by the finishing program alone."""
    lanes: int
    fold: int
    """Of the tile that the finishing program narrows with, 0 = never."""
    small: int
    """Rows of its tile of candidates."""


def plan_select(tiles: SelectTiles, num_entries: int, topk: int) -> SelectPlan:
    """From capacities alone: captured launches serve every batch."""
    largest = tiles.small[-1]
    chunks = -(-num_entries // tiles.block) if num_entries > max(tiles.block, largest) else 0
    candidates = chunks * 2 * topk if chunks else num_entries
    if candidates > largest:
        return SelectPlan(
            chunks=chunks, direct=tiles.block, lanes=tiles.lanes, fold=tiles.fold, small=1
        )
    size = next(size for size in tiles.small if size >= candidates)
    lanes = tiles.small_lanes
    return SelectPlan(
        chunks=chunks, direct=size, lanes=lanes, fold=0, small=size // (lanes * RUN_LENGTH)
    )


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
def _bracket(x, low, high, above_low, above_high, topk, most, CURVES: tl.constexpr):
    """Tighten keys low < high until topk..most of x [.., run, thread] reach low (`above_low`) or nothing lies between.

    Before and after: at least topk reach low, fewer reach high. Each step counts at two pivots in one reduction, a
    guess and the middle, which bounds the steps by 32 whatever the values are. CURVES: every other guess is curved,
    the first one too.
    """
    wanted = (topk + most).to(tl.float32) * 0.5
    curved = low == low
    while (above_low > most) & (high - 1 > low):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        guess = _guess(low, high, above_low, above_high, wanted, curved, CURVES)
        guess = tl.where((guess > low) & (guess < high), guess, middle)
        first, second = tl.minimum(guess, middle), tl.maximum(guess, middle)
        # Both counts in one number. A thread's part is exact in fp32, where compare and add take two instructions.
        hits = tl.where(x >= _value(first), 1.0, 0.0) + tl.where(x >= _value(second), 65536.0, 0.0)
        counts = tl.sum(tl.sum(hits, axis=-2).to(tl.int32))
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
def _first_ties(x, there, low, high, above_high, left, topk, most, BLOCK: tl.constexpr):
    """Of the scores that reach low but not high, only the first: as many as make topk..most; NaN for the others.

    left: lanes from each one to the end of the tile.
    """
    # no comparison sees the NaN that ties with -inf
    equal = there & ((x >= _value(high)) == 0) & ((x >= _value(low)) | (low == NEG_INF))
    near, end = 0, BLOCK
    ties = tl.sum(equal.to(tl.int32))
    while ties + above_high > most:
        middle = (near + end) // 2
        count = tl.sum((equal & (left > BLOCK - middle)).to(tl.int32))
        enough = count + above_high >= topk
        near = tl.where(enough, near, middle)
        end = tl.where(enough, middle, end)
        ties = tl.where(enough, count, ties)
    return tl.where(equal, tl.where(left > BLOCK - end, _value(low), float("nan")), x)


@triton.jit
def _halves(taken, FOLD: tl.constexpr, LANES: tl.constexpr):
    """Taken entries of each run. Two rows share an int32, the tile's first half the low bits, so that one scan ranks
    both: [FOLD / 2, LANES], or [1, LANES]."""
    counts = tl.sum(tl.where(taken, 1.0, 0.0), axis=1).to(tl.int32)
    if FOLD > 1:
        halves = tl.reshape(counts, [2, FOLD // 2, LANES]) << (tl.arange(0, 2) * 16)[:, None, None]
        counts = tl.sum(halves, axis=0)
    return counts


@triton.jit
def _taken_before(halves, total, FOLD: tl.constexpr, LANES: tl.constexpr):
    """Taken entries before each run [FOLD, LANES], in the order of entries."""
    ROWS: tl.constexpr = (FOLD + 1) // 2
    flat = tl.reshape(halves, [ROWS * LANES])
    before = tl.reshape(tl.cumsum(flat, axis=0), [ROWS, LANES]) - halves
    if FOLD > 1:
        # the high half goes on where the low one ends
        before += (total & 0xFFFF) << 16
        before = (before[None, :, :] >> (tl.arange(0, 2) * 16)[:, None, None]) & 0xFFFF
    return tl.reshape(before, [FOLD, LANES])


@triton.jit
def _by_thread(loaded, FOLD: tl.constexpr, LANES: tl.constexpr):
    """[row, load, thread, vector] -> [row, run, thread]; no value changes its thread."""
    return tl.reshape(tl.permute(loaded, (0, 1, 3, 2)), [FOLD, RUN, LANES])


@triton.jit
def _places(RUN: tl.constexpr, VECTOR: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr):
    """(lanes of a tile without their thread's share, that share), as [row, load, thread, vector]."""
    row, thread = tl.arange(0, FOLD) * (LANES * RUN), tl.arange(0, LANES) * RUN
    run = tl.arange(0, RUN // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    return row[:, None, None, None] + run[None, :, None, :], thread[None, None, :, None]


@triton.jit
def _load_row(
    row_ptr, first, end, ALIGN: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Scores of the entries [first, end), NaN behind them: what no score reaches."""
    step, thread = _places(RUN, SCORES, FOLD, LANES)
    pointers = row_ptr + (first + thread + step)
    if end - first >= FOLD * LANES * RUN:
        x = tl.load(pointers)
    else:
        # a mask of whole vectors keeps the loads wide; the row's capacity is one of them
        vectors = (end + ALIGN - 1) // ALIGN * ALIGN
        x = tl.load(pointers, mask=step < vectors - first - thread, other=0.0)
        x = tl.where(step < end - first - thread, x, float("nan"))
    return _by_thread(x, FOLD, LANES)


@triton.jit
def _load_list(list_ptr, first, end, FOLD: tl.constexpr, LANES: tl.constexpr):
    """(scores, entries) of the candidates [first, end) of a list of even length, which holds no NaN; NaN where there
    is none."""
    # both words of two candidates, four consecutive ones, in one load
    step, thread = _places(2 * RUN, 4, FOLD, LANES)
    held = tl.load(
        list_ptr + (2 * first + thread + step),
        mask=step < (end + 1) // 2 * 4 - 2 * first - thread,
        other=float("nan"),
    )
    entry, x = tl.split(tl.reshape(held, [FOLD, RUN // 2, LANES, 2, 2]))
    return _by_thread(x, FOLD, LANES), _by_thread(entry.to(tl.int32, bitcast=True), FOLD, LANES)


@triton.jit
def _best(
    row_ptr, list_ptr, out_ptr, first, end, listed, topk, most,
    ALIGN: tl.constexpr, FOLD: tl.constexpr, LANES: tl.constexpr,
    GROUPED: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Write topk..most candidates, among them the topk best, of the entries [first, end) of a row, or, if `listed`, of
    the candidates that stand there in a list; ascending like these.

    GROUPED: bound them by the maxima of groups first; write them as a list, pairs of entry and score with NaN behind
    them. Otherwise write entries.
    The output may overwrite the list up to this tile's own part.
    """
    BLOCK: tl.constexpr = FOLD * LANES * RUN
    # A thread holds a run of each row. An entry is a constant plus its thread's share: no register holds it, and
    # scattered stores need no other layout.
    thread = tl.arange(0, LANES)[None, None, :] * RUN
    step = tl.arange(0, FOLD)[:, None, None] * (LANES * RUN) + tl.arange(0, RUN)[None, :, None]
    if listed:
        x, entry = _load_list(list_ptr, first, end, FOLD, LANES)
    else:
        x = _load_row(row_ptr, first, end, ALIGN, FOLD, LANES)
        if LISTS:
            entry = first + thread + step
    if GROUPED:
        maxima = tl.max(x, axis=0)
        lowest = tl.min(_key(tl.min(maxima, axis=0)), axis=0)
        highest = tl.max(_key(tl.max(maxima, axis=0)), axis=0) + 1
        low, _, _, _ = _bracket(
            maxima, lowest, highest, lowest * 0 + LANES * RUN, lowest * 0, topk, topk + topk // 4,
            CURVES=False,
        )  # fmt: skip
    else:
        low = tl.min(_key(tl.min(x, axis=1)))
        highest = tl.max(_key(tl.max(x, axis=1))) + 1
    floor = _value(low)
    halves = _halves(x >= floor, FOLD, LANES)
    total = tl.sum(halves)
    count = (total & 0xFFFF) + (total >> 16)
    # a comparison with -inf misses the NaN that ties with it
    low = tl.where(count < topk, NEG_INF, low)
    if (count > most) | (low == NEG_INF):
        count = tl.where(low == NEG_INF, BLOCK, count)
        low, high, count, above_high = _bracket(
            x, low, highest, count, count * 0, topk, most, CURVES=True
        )
        floor = _value(low)
        if (count > most) | (low == NEG_INF):
            there = step < end - first - thread
            if listed:
                there = there & (x == x)
            left = BLOCK - thread - step
            x = _first_ties(x, there, low, high, above_high, left, topk, most, BLOCK)
        halves = _halves(x >= floor, FOLD, LANES)
        total = tl.sum(halves)
        count = (total & 0xFFFF) + (total >> 16)
    before = _taken_before(halves, total, FOLD, LANES)
    # compared again, behind the scan: predicates that outlive it would be packed into registers bit by bit
    taken = x >= floor
    run_start = tl.where(tl.arange(0, RUN)[None, :, None] == 0, before[:, None, :], 0)
    rank = tl.cumsum(taken.to(tl.int32) + run_start, axis=1)
    if LISTS == 0:
        entry = first + thread + step
    if listed:
        # every thread has read its part of the list before another overwrites it
        tl.debug_barrier()
    if GROUPED:
        word = tl.arange(0, 2)
        tl.store(
            out_ptr - 2 + (2 * rank[:, :, :, None] + word),
            tl.join(entry.to(tl.float32, bitcast=True), x),
            mask=taken[:, :, :, None] & (word >= 0),
        )
        behind = tl.arange(0, 2 * LANES * RUN)
        tl.store(out_ptr + behind, float("nan"), mask=(behind >= 2 * count) & (behind < 2 * most))
    else:
        tl.store(out_ptr - 1 + rank, entry, mask=taken)


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
    _best(row_ptr, out_ptr, out_ptr, first, end, False, topk, most, ALIGN, FOLD, LANES, True, False)


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
            while end > SMALL * LANES * RUN:
                kept = 0
                for first in range(0, end, FOLD * LANES * RUN):
                    _best(
                        row_ptr, list_ptr, list_ptr + tl.multiple_of(kept * 2, 4),
                        first, tl.minimum(end, first + FOLD * LANES * RUN), listed, topk, most,
                        ALIGN, FOLD, LANES, True, True,
                    )  # fmt: skip
                    kept += most
                tl.debug_barrier()
                end = kept
                listed = end > 0
        _best(
            row_ptr, list_ptr, picks_ptr, 0, end, listed, topk, topk, ALIGN, SMALL, LANES, False, True
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
            count += tl.sum(((_key(x) >= middle) & (entry < visible)).to(tl.int32))
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
    list_stride = _list_stride(output.scratch, num_tokens, plan, topk)
    lists = output.scratch.view(torch.float32)
    scores = (scores_TN, scores_TN.stride(0), inputs.num_visible_T)
    numbers = {
        "first_token": first, "num_entries": num_entries, "topk": topk, "most": 2 * topk,
        "direct": plan.direct, "ALIGN": _align(scores_TN),
    }  # fmt: skip
    if plan.chunks:
        _narrow_kernel[num_tokens, plan.chunks](
            *scores, lists, list_stride, **numbers,
            FOLD=tiles.fold, LANES=tiles.lanes, **_options(tiles.lanes, scores_TN.device),
        )  # fmt: skip
    _finish_kernel[num_tokens,](
        *scores, inputs.slot_T, lists, output.scratch, list_stride, *_targets(output), **numbers,
        chunk=tiles.block, FOLD=plan.fold, LANES=plan.lanes, SMALL=plan.small,
        **_options(plan.lanes, scores_TN.device),
    )  # fmt: skip


def _list_stride(scratch: Tensor, num_tokens: int, plan: SelectPlan, topk: int) -> int:
    """int32 lanes of a row: its lists of 2 K candidates of two words, or K picks alone."""
    lists = max(plan.chunks, 1 if plan.fold else 0)
    stride = lists * 4 * topk if lists else topk
    if scratch.numel() < num_tokens * stride:
        raise KernelError(
            f"select: scratch {scratch.numel()} int32 lanes, {num_tokens * stride} needed for "
            f"{topk} picks of {num_tokens} tokens; size it with dsv4.metadata.buffers.select_scratch"
        )
    return stride


def _options(lanes: int, device: torch.device) -> dict[str, int]:
    """One thread a lane. Two narrowing programs share an SM's registers."""
    if torch.version.hip:
        return {"num_warps": max(lanes // 64, 1)}
    options = {"num_warps": max(lanes // 32, 1)}
    return options | {"maxnreg": MAX_REGISTERS} if device.type == "cuda" else options


def _scan(
    tiles: SelectTiles, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, first: int
) -> None:
    num_tokens, num_entries = scores_TN.shape
    _scan_kernel[(num_tokens,)](
        scores_TN, scores_TN.stride(0), inputs.num_visible_T, inputs.slot_T, *_targets(output),
        first, num_entries, output.lane_TK.shape[1],
        BLOCK=tiles.scan, **_options(tiles.lanes, scores_TN.device),
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
    whole = scores_TN.stride(0) % SCORES.value == 0 and scores_TN.shape[1] % SCORES.value == 0
    return SCORES.value if whole and scores_TN.data_ptr() % 16 == 0 else 1


def variants() -> tuple[KernelVariant, ...]:
    """The kernels for the published dims: 512 picks (Flash) and 1,024 (Pro)."""
    tiles = SelectTiles()
    pointers = {"scores_ptr": "*fp32", "lists_ptr": "*fp32"} | dict.fromkeys(
        ("visible_ptr", "slot_ptr", "picks_ptr", "table_ptr", "lane_ptr", "indices_ptr"), "*i32"
    )

    def variant(name: str, fn: Any, lanes: int, **sizes: int) -> list[KernelVariant]:
        signature = pointers | dict.fromkeys(NUMBERS, "i32")
        return [
            KernelVariant(
                name=f"select {name} {warp_lanes}",
                fn=fn,
                signature={key: kind for key, kind in signature.items() if key in fn.arg_names},
                constexprs={"ALIGN": SCORES.value, "LANES": lanes, **sizes},
                num_warps=lanes // warp_lanes,
                aligned=tuple(key for key in pointers if key in fn.arg_names),
                targets=targets,
            )
            for warp_lanes, targets in ((32, ("sm_90", "sm_100")), (64, ("gfx942", "gfx950")))
        ]

    return (
        *variant("narrow", _narrow_kernel, tiles.lanes, FOLD=tiles.fold),
        *variant("narrow and finish", _finish_kernel, tiles.lanes, FOLD=tiles.fold, SMALL=1),
        *(
            each
            for size in tiles.small
            for each in variant(
                f"finish {size}", _finish_kernel, tiles.small_lanes,
                FOLD=0, SMALL=size // (tiles.small_lanes * RUN_LENGTH),
            )
        ),
    )  # fmt: skip
