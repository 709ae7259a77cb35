"""The fold of an HCA compressor: closing windows and accumulators, token by token in order.

A segment is what `FoldPlan` calls one: closing windows first, then one accumulator a request. D lanes of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.entry_triton import (
    append,
    exp,
    find_raw,
    load_norm,
    load_rotation,
    only_if,
    store_entry,
    store_raw,
    store_raw_of_span,
    wait_for_launch,
)


@triton.jit
def fold_step(maximum, total, weighted, gate, value):
    """Fold one token: `dsv4.pool.fold.fold_step` to the last bit of the device's exponential.

    Of that function's two exponentials one is always of 0, which is exactly 1. Compile without fusion of
    multiplications and additions: torch does not fuse them either.
    """
    up = gate > maximum
    masked = gate == float("-inf")
    one_weight = exp(-tl.abs(tl.where(masked, 0.0, gate) - maximum))
    keep = tl.where(up, one_weight, 1.0)
    take = tl.where(up, 1.0, tl.where(masked, 0.0, one_weight))
    folded = weighted * keep + take * value
    return (
        tl.where(up, gate, maximum),
        total * keep + take,
        tl.where(masked, weighted, folded),
    )


@triton.jit
def _raw(
    step,
    num_steps,
    source_ptr,
    position_ptr,
    count,
    lane,
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    state_ptr,
    state_stride,
    num_state_rows,
    num_tokens,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
):
    """(gate, value) of a segment's token: -inf and 0 where it is no row or in the accumulator already."""
    inside = step < num_steps
    source = tl.load(source_ptr + step, mask=inside, other=-1)
    position = tl.load(position_ptr + step, mask=inside, other=0)
    row, own, live = find_raw(
        source, projected_ptr, projected_stride, state_ptr, state_stride, num_state_rows, num_tokens
    )
    there = lane < DIM
    value = tl.load(row + lane, mask=only_if(live, there), other=0.0)
    gate = tl.load(row + DIM + lane, mask=only_if(live, there), other=0.0)
    # the state's gates have their position bias already
    bias = ape_ptr + (position % RATIO) * ape_stride
    ape = tl.load(bias + lane, mask=only_if(own, there), other=0.0)
    return tl.where(
        live & (position >= count), tl.where(own, gate + ape, gate), float("-inf")
    ), value


@triton.jit
def _find_run(
    source,
    position,
    num_steps,
    count,
    num_state_rows,
    num_tokens,
    RATIO: tl.constexpr,
    STEPS: tl.constexpr,
):
    """(steps in front of the run, steps of the run, its first token, its first position). A segment's last steps are
    a run where they are neighbouring tokens of this forward: those need no index each. Without a run all steps lie
    in front of it."""
    step = tl.arange(0, STEPS)
    live = (source >= 0) & (source < num_state_rows + num_tokens) & (position >= count)
    live &= step < num_steps
    own = live & (source >= num_state_rows)
    end = tl.max(tl.where(live, step + 1, 0), 0)
    front = tl.min(tl.where(own, step, end), 0)
    # one of a run's neighbours tells where the others are
    token = tl.max(tl.where(step == front, source - num_state_rows, -1), 0)
    start = tl.max(tl.where(step == front, position, 0), 0)
    ahead = step - front
    run = own & (source == num_state_rows + token + ahead) & (position == start + ahead)
    whole = tl.sum(run.to(tl.int32), 0) == end - front
    whole &= start % RATIO + end - front <= RATIO
    return tl.where(whole, front, end), tl.where(whole, end - front, 0), token, start


@triton.jit
def _finite_step(maximum, total, weighted, gate, value):
    """`fold_step` to the last bit, of a gate that is not -inf."""
    up = gate > maximum
    one_weight = exp(-tl.abs(gate - maximum))
    keep = tl.where(up, one_weight, 1.0)
    take = tl.where(up, 1.0, one_weight)
    return tl.where(up, gate, maximum), total * keep + take, weighted * keep + take * value


@triton.jit
def _fold_block(
    maximum, total, weighted, num, row, projected_stride, bias, ape_stride, there, WHOLE: tl.constexpr,
    DIM: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Fold the first `num` of RUN neighbouring tokens, or all if WHOLE; all are loaded before the first is folded."""
    loaded = ()
    biases = ()
    values = ()
    for j in tl.static_range(RUN):
        mask = there if WHOLE else only_if(j < num, there)
        loaded = append(loaded, tl.load(row + j * projected_stride + DIM, mask=mask, other=0.0))
        biases = append(biases, tl.load(bias + j * ape_stride, mask=mask, other=0.0))
        values = append(values, tl.load(row + j * projected_stride, mask=mask, other=0.0))
    gates = ()
    lowest = there.to(tl.float32)
    for j in tl.static_range(RUN):
        gates = append(gates, tl.where(WHOLE or j < num, loaded[j] + biases[j], float("-inf")))
        lowest = tl.minimum(lowest, gates[j])
    finite = WHOLE and tl.max((lowest == float("-inf")).to(tl.int32), 0) == 0
    if finite:
        for j in tl.static_range(RUN):
            maximum, total, weighted = _finite_step(maximum, total, weighted, gates[j], values[j])
    else:
        for j in tl.static_range(RUN):
            maximum, total, weighted = fold_step(maximum, total, weighted, gates[j], values[j])
    return maximum, total, weighted


@triton.jit
def _fold_run(
    maximum, total, weighted, num, row, projected_stride, bias, ape_stride, lane, DIM: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Fold `num` neighbouring tokens from `row` on, the first token's channels."""
    there = lane < DIM
    row += lane
    bias += lane
    whole = num - num % RUN
    for _ in range(0, whole, RUN):
        maximum, total, weighted = _fold_block(
            maximum, total, weighted, RUN, row, projected_stride, bias, ape_stride, there, True, DIM, RUN
        )  # fmt: skip
        row += RUN * projected_stride
        bias += RUN * ape_stride
    if whole < num:
        maximum, total, weighted = _fold_block(
            maximum, total, weighted, num - whole, row, projected_stride, bias, ape_stride, there, False,
            DIM, RUN,
        )  # fmt: skip
    return maximum, total, weighted


@triton.jit
def _load_steps(segment, num_steps, wanted, source_ptr, position_ptr, STEPS: tl.constexpr):
    """(sources, positions) [STEPS] of a segment, if they are wanted."""
    step = tl.arange(0, STEPS)
    mask = only_if(wanted, step < num_steps)
    at = segment.to(tl.int64) * num_steps + step
    return tl.load(source_ptr + at, mask=mask, other=-1), tl.load(
        position_ptr + at, mask=mask, other=0
    )


@triton.jit
def fold_segment(
    segment,
    source,
    position,
    maximum,
    total,
    weighted,
    count,
    lane,
    num_steps,
    source_ptr,
    position_ptr,
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    state_ptr,
    state_stride,
    num_state_rows,
    num_tokens,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    STEPS: tl.constexpr,
    RUN: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Fold a segment's tokens at or behind position `count` into a state. RUN tokens of a run are loaded ahead of the
    fold, AHEAD of other tokens; a run is looked for in `source` and `position` [STEPS] (RUN = 0: not at all)."""
    source_ptr += segment.to(tl.int64) * num_steps
    position_ptr += segment.to(tl.int64) * num_steps
    front = num_steps
    if RUN:
        front, num, token, start = _find_run(
            source, position, num_steps, count, num_state_rows, num_tokens, RATIO, STEPS
        )
    for first in range(0, front, AHEAD):
        gates = ()
        values = ()
        for j in tl.static_range(AHEAD):
            gate, value = _raw(
                first + j, front, source_ptr, position_ptr, count, lane, projected_ptr,
                projected_stride, ape_ptr, ape_stride, state_ptr, state_stride, num_state_rows,
                num_tokens, RATIO, DIM,
            )  # fmt: skip
            gates = append(gates, gate)
            values = append(values, value)
        for j in tl.static_range(AHEAD):
            maximum, total, weighted = fold_step(maximum, total, weighted, gates[j], values[j])
    if RUN:
        row = projected_ptr + token.to(tl.int64) * projected_stride
        maximum, total, weighted = _fold_run(
            maximum, total, weighted, num, row, projected_stride, ape_ptr + (start % RATIO) * ape_stride,
            ape_stride, lane, DIM, RUN,
        )  # fmt: skip
    return maximum, total, weighted


@triton.jit
def _accumulator(
    row, accumulator_ptr, accumulator_stride, num_accumulators, lane, wanted, DIM: tl.constexpr
):
    """(max, sum, weighted sum, tokens folded) of a row; 0 tokens where it is none. Channels are read if `wanted`."""
    has = (row >= 0) & (row < num_accumulators)
    place = accumulator_ptr + tl.where(has, row, 0).to(tl.int64) * accumulator_stride
    mask = only_if(has & wanted, lane < DIM)
    maximum = tl.load(place + lane, mask=mask, other=float("-inf"))
    total = tl.load(place + DIM + lane, mask=mask, other=0.0)
    weighted = tl.load(place + 2 * DIM + lane, mask=mask, other=0.0)
    count = tl.load(place + 3 * DIM, mask=has, other=0.0)
    return maximum, total, weighted, count.to(tl.int32)


@triton.jit
def _store_accumulator(place, lane, maximum, total, weighted, DIM: tl.constexpr):
    tl.store(place + lane, maximum, mask=lane < DIM)
    tl.store(place + DIM + lane, total, mask=lane < DIM)
    tl.store(place + 2 * DIM + lane, weighted, mask=lane < DIM)


@triton.jit(
    do_not_specialize=[
        "num_steps", "num_closing", "num_tokens", "num_state_rows", "num_entry_rows", "num_accumulators",
    ]
)  # fmt: skip
def fold_in_place_kernel(
    projected_ptr, projected_stride, ape_ptr, ape_stride, norm_ptr, cos_ptr, sin_ptr, starts_ptr,
    closing_indptr_ptr, source_ptr, position_ptr, start_ptr, accumulator_row_ptr, accumulator_loc_ptr,
    folded_ptr, entry_loc_ptr, ape_row_ptr, state_loc_ptr, state_ptr, state_stride, accumulator_ptr,
    accumulator_stride, table_ptr, table_stride, eps, num_steps, num_closing, num_tokens, num_state_rows,
    num_entry_rows, num_accumulators, RATIO: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    ROUNDING: tl.constexpr, KIND: tl.constexpr, PLANE_ROWS: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A request a program: its closing windows, its accumulator, its raw rows."""
    norm = load_norm(norm_ptr, DIM, D)
    wait_for_launch(PDL)
    request = tl.program_id(0)
    lane = tl.arange(0, D)
    own = num_closing + request
    row = tl.load(accumulator_row_ptr + own)
    if (row >= 0) & (row < num_accumulators):
        maximum, total, weighted, count = _accumulator(
            row, accumulator_ptr, accumulator_stride, num_accumulators, lane, True, DIM
        )
        old_maximum, old_total, old_weighted = maximum, total, weighted
        lo = tl.load(closing_indptr_ptr + request)
        hi = tl.load(closing_indptr_ptr + request + 1)
        for i in range(lo, hi + 1):  # the accumulator's own segment last
            segment = tl.where(i < hi, i, own)
            cos, sin, turned = load_rotation(i, i < hi, cos_ptr, sin_ptr, DIM, ROPE, D)
            holds = count > tl.load(start_ptr + segment)
            maximum, total, weighted = fold_segment(
                segment, 0, 0, tl.where(holds, old_maximum, float("-inf")), tl.where(holds, old_total, 0.0),
                tl.where(holds, old_weighted, 0.0), count, lane, num_steps, source_ptr, position_ptr,
                projected_ptr, projected_stride, ape_ptr, ape_stride, state_ptr, state_stride,
                num_state_rows, num_tokens, RATIO, DIM, 1, 0, AHEAD,
            )  # fmt: skip
            if i < hi:
                entry_loc = tl.load(entry_loc_ptr + i)
                if (entry_loc >= 0) & (entry_loc < num_entry_rows):
                    store_entry(
                        tl.div_rn(weighted, total), entry_loc, norm, eps, cos, sin, turned,
                        table_ptr, table_stride, DIM, ROPE, ROUNDING, KIND, PLANE_ROWS, D,
                    )  # fmt: skip
        loc = tl.load(accumulator_loc_ptr + request)
        folded = tl.load(folded_ptr + request)
        start = tl.load(starts_ptr + request)
        end = tl.load(starts_ptr + request + 1)
        # threads of this program still read the rows that others of its threads now write
        tl.debug_barrier()
        if (loc >= 0) & (loc < num_accumulators) & (count < folded):
            place = accumulator_ptr + loc.to(tl.int64) * accumulator_stride
            _store_accumulator(place, lane, maximum, total, weighted, DIM)
            tl.store(place + 3 * DIM, folded.to(tl.float32))
        for first in range(start, end, ROWS):
            store_raw(
                first, end, projected_ptr, projected_stride, ape_ptr, ape_stride, ape_row_ptr,
                state_loc_ptr, state_ptr, state_stride, num_state_rows, DIM, ROWS, COLS, False,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_steps", "num_closing", "num_tokens", "num_state_rows", "num_accumulators",
    ]
)  # fmt: skip
def fold_kernel(
    projected_ptr, projected_stride: tl.constexpr, ape_ptr, ape_stride: tl.constexpr, closing_indptr_ptr,
    source_ptr, position_ptr, start_ptr, accumulator_row_ptr, accumulator_loc_ptr, folded_ptr, state_ptr,
    state_stride, accumulator_ptr, accumulator_stride, pooled_ptr, pooled_stride, num_steps, num_closing,
    num_tokens, num_state_rows, num_accumulators, RATIO: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    STEPS: tl.constexpr, RUN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (segment, D channels). Windows go to `pooled`, accumulators to their rows, but for the count of tokens:
    every program of this launch reads it.

    A window that goes on from an accumulator is folded by the accumulator's own program, which writes what it read.
    """
    wait_for_launch(PDL)
    program = tl.program_id(0)
    lane = tl.program_id(1) * D + tl.arange(0, D)
    closes = program < num_closing
    request = tl.maximum(program - num_closing, 0)
    row = tl.load(accumulator_row_ptr + program)
    start = tl.load(start_ptr + program)
    # most programs fold this one alone
    own_source, own_position = _load_steps(
        program, num_steps, True, source_ptr, position_ptr, STEPS
    )
    first = tl.load(closing_indptr_ptr + request, mask=not closes, other=0)
    behind = tl.load(closing_indptr_ptr + request + 1, mask=not closes, other=0)
    begun = tl.load(start_ptr + first, mask=first < behind, other=0)
    maximum, total, weighted, count = _accumulator(
        row, accumulator_ptr, accumulator_stride, num_accumulators, lane, not closes, DIM
    )
    old_maximum, old_total, old_weighted = maximum, total, weighted
    # windows begin RATIO tokens apart: those that the accumulator has begun come first
    continued = tl.minimum(behind - first, tl.cdiv(tl.maximum(count - begun, 0), RATIO))
    num = tl.where((row >= 0) & (row < num_accumulators), continued + 1, 0)
    num = tl.where(closes & (count > start), 0, num)
    for i in range(num):
        segment = tl.where(i < continued, first + i, program)
        other = segment != program
        source, position = _load_steps(segment, num_steps, other, source_ptr, position_ptr, STEPS)
        source = tl.where(other, source, own_source)
        position = tl.where(other, position, own_position)
        holds = count > tl.load(start_ptr + segment)
        maximum, total, weighted = fold_segment(
            segment, source, position, tl.where(holds, old_maximum, float("-inf")),
            tl.where(holds, old_total, 0.0), tl.where(holds, old_weighted, 0.0), count, lane,
            num_steps, source_ptr, position_ptr,
            projected_ptr, projected_stride, ape_ptr, ape_stride, state_ptr, state_stride,
            num_state_rows, num_tokens, RATIO, DIM, STEPS, RUN, AHEAD,
        )  # fmt: skip
        if segment < num_closing:
            pooled = pooled_ptr + segment.to(tl.int64) * pooled_stride + lane
            tl.store(pooled, tl.div_rn(weighted, total), mask=lane < DIM)
        else:
            loc = tl.load(accumulator_loc_ptr + request)
            folded = tl.load(folded_ptr + request)
            if (loc >= 0) & (loc < num_accumulators) & (count < folded):
                place = accumulator_ptr + loc.to(tl.int64) * accumulator_stride
                _store_accumulator(place, lane, maximum, total, weighted, DIM)


@triton.jit(
    do_not_specialize=[
        "num_closing", "num_requests", "num_tokens", "num_state_rows", "num_entry_rows", "num_accumulators",
    ]
)  # fmt: skip
def finish_kernel(
    projected_ptr, projected_stride, ape_ptr, ape_stride, norm_ptr, cos_ptr, sin_ptr, accumulator_loc_ptr,
    folded_ptr, entry_loc_ptr, ape_row_ptr, state_loc_ptr, state_ptr, state_stride, accumulator_ptr,
    accumulator_stride, pooled_ptr, pooled_stride, table_ptr, table_stride, eps, num_closing, num_requests,
    num_tokens, num_state_rows, num_entry_rows, num_accumulators, DIM: tl.constexpr, ROPE: tl.constexpr,
    ROUNDING: tl.constexpr, KIND: tl.constexpr, PLANE_ROWS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, REQUESTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What must follow the fold. Programs: a pooled window each; then the raw rows of SPAN tokens each; then the
    accumulators' counts of REQUESTS requests each."""
    program = tl.program_id(0)
    behind = program - num_closing
    state_programs = tl.cdiv(num_tokens, SPAN)
    if program < num_closing:
        loc = tl.load(entry_loc_ptr + program)
        norm = load_norm(norm_ptr, DIM, D)
        cos, sin, turned = load_rotation(program, True, cos_ptr, sin_ptr, DIM, ROPE, D)
        wait_for_launch(PDL)
        if (loc >= 0) & (loc < num_entry_rows):
            lane = tl.arange(0, D)
            pooled = pooled_ptr + program.to(tl.int64) * pooled_stride + lane
            store_entry(
                tl.load(pooled, mask=lane < DIM, other=0.0), loc, norm, eps, cos, sin, turned, table_ptr,
                table_stride, DIM, ROPE, ROUNDING, KIND, PLANE_ROWS, D,
            )  # fmt: skip
    elif behind < state_programs:
        store_raw_of_span(
            behind * SPAN, num_tokens, projected_ptr, projected_stride, ape_ptr, ape_stride,
            ape_row_ptr, state_loc_ptr, state_ptr, state_stride, num_state_rows, DIM, SPAN, ROWS, COLS, PDL,
        )  # fmt: skip
    else:
        request = (behind - state_programs) * REQUESTS + tl.arange(0, REQUESTS)
        inside = request < num_requests
        loc = tl.load(accumulator_loc_ptr + request, mask=inside, other=-1)
        folded = tl.load(folded_ptr + request, mask=inside, other=0).to(tl.float32)
        wait_for_launch(PDL)
        ok = (loc >= 0) & (loc < num_accumulators)
        count = accumulator_ptr + loc.to(tl.int64) * accumulator_stride + 3 * DIM
        old = tl.load(count, mask=ok, other=0.0)
        tl.store(count, folded, mask=ok & (old < folded))
