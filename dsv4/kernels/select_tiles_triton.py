"""The best entries of one tile of scores: what a Triton select does in registers.

Legend: F rows of a tile, L threads.

A tile [F, L * RUN] of consecutive entries is held [F, RUN, L]: a run of each row to a thread. To leave few candidates,
it is bounded by the maxima of its columns, groups of F entries far apart: at least K entries reach the K-th largest
maximum, and few more do. So one pass of maxima, a search over them and one compaction leave at most 2 K candidates in
ascending order, without a search over the tile itself. To leave exactly K, the tile itself is searched.

Scores are searched as int32 keys in their order. Pivots only steer: what is picked is a function of the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEG_INF: tl.constexpr = tl.constexpr(-2139095041)
"""Key of -inf, the lowest of all scores."""
RUN: tl.constexpr = tl.constexpr(8)
"""Consecutive scores of a thread: a whole sector. Each run of a tile costs a step of the scan."""
SCORES: tl.constexpr = tl.constexpr(4)
"""Scores of a 16-byte load."""


@triton.jit
def ordered(x):
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_key(x):
    """int32 in the order of the scores: NaN as -inf, -0 as 0."""
    return ordered(tl.where(x == x, x, float("-inf")) + 0.0)


@triton.jit
def key_score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bounds(x, axis: tl.constexpr):
    """Keys of the lowest score and of more than the highest. Without a score: low is no less than high."""
    least, most = tl.min(x, axis=axis), tl.max(x, axis=axis)
    least = tl.where(least == least, least, float("inf"))
    return tl.min(score_key(least)), tl.max(score_key(most)) + 1


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
    start = key_score(low)
    return ordered(start + (key_score(high) - start) * ((top - wanted) / (top - bottom)))


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
        hits = tl.where(x >= key_score(first), 1.0, 0.0) + tl.where(
            x >= key_score(second), 65536.0, 0.0
        )
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
    """x without NaN where an entry stays. Of the scores that reach low but not high only the first do: as many as make
    topk..most.

    left: lanes from each one to the end of the tile.
    """
    # no comparison sees the NaN that ties with -inf
    equal = there & ((x >= key_score(high)) == 0) & ((x >= key_score(low)) | (low == NEG_INF))
    near, end = 0, BLOCK
    ties = tl.sum(equal.to(tl.int32))
    while ties + above_high > most:
        middle = (near + end) // 2
        count = tl.sum((equal & (left > BLOCK - middle)).to(tl.int32))
        enough = count + above_high >= topk
        near = tl.where(enough, near, middle)
        end = tl.where(enough, middle, end)
        ties = tl.where(enough, count, ties)
    kept = tl.where(x == x, x, float("-inf"))
    return tl.where(equal, tl.where(left > BLOCK - end, kept, float("nan")), x)


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
def best(
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
    few = end - first <= most
    if GROUPED:
        maxima = tl.max(x, axis=0)
        low, highest = _bounds(maxima, 0)
        groups = tl.where(few, 0, LANES * RUN)
        low, _, _, _ = _bracket(
            maxima, low, highest, groups, groups * 0, topk, topk + topk // 4, CURVES=False
        )
    else:
        low, highest = _bounds(x, 1)
    floor = key_score(low)
    halves = _halves(x >= floor, FOLD, LANES)
    total = tl.sum(halves)
    count = (total & 0xFFFF) + (total >> 16)
    # comparisons miss the NaN that tie with -inf
    low = tl.where((count < topk) | few, NEG_INF, low)
    if (count > most) | (low == NEG_INF):
        count = tl.where(low == NEG_INF, end - first, count)
        low, high, count, above_high = _bracket(
            x, low, highest, count, count * 0, topk, most, CURVES=True
        )
        floor = key_score(low)
        if (count > most) | (low == NEG_INF):
            # a list has NaN only where it has no candidate
            there = x == x
            if not listed:
                there = step < end - first - thread
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
    if not LISTS:
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
