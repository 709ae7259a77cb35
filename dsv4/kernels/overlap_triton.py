"""Pooling of a CSA compressor: 2 * RATIO raw rows a window, their A halves before, their B halves after the border."""

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

RESIDENT = tl.constexpr(8)
"""Most raw rows whose halves a program keeps in registers: 16 x 4 values a thread."""


@triton.jit
def _half(
    j,
    source,
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
    D: tl.constexpr,
):
    """(gate, bias, value, whether it is own, whether it is a row) [D] of pooled token j: 0 where it is no row."""
    row, own, live = find_raw(
        source, projected_ptr, projected_stride, state_ptr, state_stride, num_state_rows, num_tokens
    )
    column = (j // RATIO) * DIM
    lane = tl.arange(0, D)
    mask = only_if(live, lane < DIM)
    gate = tl.load(row + 2 * DIM + column + lane, mask=mask, other=0.0)
    bias = ape_ptr + (j % RATIO) * ape_stride + column
    return (
        gate,
        tl.load(bias + lane, mask=lane < DIM, other=0.0),
        tl.load(row + column + lane, mask=mask, other=0.0),
        own,
        live,
    )


@triton.jit
def _biased(gate, bias, own, live):
    """The state's gates have their position bias already."""
    return tl.where(live, tl.where(own, gate + bias, gate), float("-inf"))


@triton.jit
def _weigh(gates, values, ROWS: tl.constexpr, D: tl.constexpr):
    """Pooled channels [D] of ROWS rows in registers."""
    highest = tl.full([D], float("-inf"), tl.float32)
    total = tl.zeros([D], tl.float32)
    weighted = tl.zeros([D], tl.float32)
    for j in tl.static_range(ROWS):
        highest = tl.maximum(highest, gates[j])
    for j in tl.static_range(ROWS):
        weight = exp(gates[j] - highest)
        total += weight
        weighted += weight * values[j]
    return tl.div_rn(weighted, total)


@triton.jit
def _find_run(source_ptr, num_state_rows, num_tokens, RATIO: tl.constexpr, STEPS: tl.constexpr):
    """(whether a window's rows are neighbouring tokens of this forward, the first): all but the first two windows that
    a request closes. One index tells where they are. STEPS: a power of two >= 2 * RATIO."""
    step = tl.arange(0, STEPS)
    first = tl.load(source_ptr)
    source = tl.load(source_ptr + step, mask=step < 2 * RATIO, other=-1)
    ahead = (step >= 2 * RATIO) | (source == first + step)
    whole = tl.min(ahead.to(tl.int32), 0) == 1
    run = whole & (first >= num_state_rows) & (first <= num_state_rows + num_tokens - 2 * RATIO)
    return run, tl.where(run, first - num_state_rows, 0)


@triton.jit
def _pool_run(
    token,
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Pooled channels [D] of 2 * RATIO neighbouring tokens. Every load is on its way before the first is used."""
    lane = tl.arange(0, D)
    there = lane < DIM
    row = projected_ptr + token.to(tl.int64) * projected_stride + lane
    loaded = ()
    biases = ()
    values = ()
    for j in tl.static_range(2 * RATIO):
        half = row + j * projected_stride + (j // RATIO) * DIM
        bias = ape_ptr + (j % RATIO) * ape_stride + (j // RATIO) * DIM + lane
        loaded = append(loaded, tl.load(half + 2 * DIM, mask=there, other=0.0))
        biases = append(biases, tl.load(bias, mask=there, other=0.0))
    for j in tl.static_range(2 * RATIO):
        half = row + j * projected_stride + (j // RATIO) * DIM
        values = append(values, tl.load(half, mask=there, other=0.0))
    gates = ()
    for j in tl.static_range(2 * RATIO):
        gates = append(gates, loaded[j] + biases[j])
    return _weigh(gates, values, 2 * RATIO, D)


@triton.jit
def _pool_rows(
    source_ptr,
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
    D: tl.constexpr,
):
    """Pooled channels [D] of rows from anywhere."""
    rows: tl.constexpr = 2 * RATIO
    if rows <= RESIDENT:
        sources = ()
        for j in tl.static_range(rows):
            sources = append(sources, tl.load(source_ptr + j))
        loaded = ()
        values = ()
        for j in tl.static_range(rows):
            gate, bias, value, own, live = _half(
                j, sources[j], projected_ptr, projected_stride, ape_ptr, ape_stride, state_ptr,
                state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
            )  # fmt: skip
            loaded = append(loaded, (gate, bias, own, live))
            values = append(values, value)
        gates = ()
        for j in tl.static_range(rows):
            gates = append(gates, _biased(loaded[j][0], loaded[j][1], loaded[j][2], loaded[j][3]))
        return _weigh(gates, values, rows, D)
    else:
        highest = tl.full([D], float("-inf"), tl.float32)
        total = tl.zeros([D], tl.float32)
        weighted = tl.zeros([D], tl.float32)
        for j in range(rows):
            gate, bias, value, own, live = _half(
                j, tl.load(source_ptr + j), projected_ptr, projected_stride, ape_ptr, ape_stride,
                state_ptr, state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
            )  # fmt: skip
            highest = tl.maximum(highest, _biased(gate, bias, own, live))
        for j in range(rows):
            gate, bias, value, own, live = _half(
                j, tl.load(source_ptr + j), projected_ptr, projected_stride, ape_ptr, ape_stride,
                state_ptr, state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
            )  # fmt: skip
            weight = exp(_biased(gate, bias, own, live) - highest)
            total += weight
            weighted += weight * value
        return tl.div_rn(weighted, total)


@triton.jit(do_not_specialize=["num_closing", "num_tokens", "num_state_rows", "num_entry_rows"])
def overlap_kernel(
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    source_ptr,
    entry_loc_ptr,
    ape_row_ptr,
    state_loc_ptr,
    state_ptr,
    state_stride,
    table_ptr,
    table_stride,
    eps,
    num_closing,
    num_tokens,
    num_state_rows,
    num_entry_rows,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs [0, num_closing) close a window each; those behind write the raw rows of ROWS tokens each."""
    program = tl.program_id(0)
    norm = load_norm(norm_ptr, DIM, D)
    wait_for_launch(PDL)
    if program >= num_closing:
        first = (program - num_closing) * ROWS
        store_raw(
            first, num_tokens, projected_ptr, projected_stride, ape_ptr, ape_stride, ape_row_ptr,
            state_loc_ptr, state_ptr, state_stride, num_state_rows, 2 * DIM, ROWS, COLS, False,
        )  # fmt: skip
    else:
        loc = tl.load(entry_loc_ptr + program)
        cos, sin, turned = load_rotation(program, True, cos_ptr, sin_ptr, DIM, ROPE, D)
        source_ptr += program.to(tl.int64) * (2 * RATIO)
        run = False
        token = 0
        if 2 * RATIO <= RESIDENT:
            run, token = _find_run(source_ptr, num_state_rows, num_tokens, RATIO, STEPS)
        if (loc >= 0) & (loc < num_entry_rows):
            pooled = tl.zeros([D], tl.float32)
            if run:
                if 2 * RATIO <= RESIDENT:
                    pooled = _pool_run(
                        token, projected_ptr, projected_stride, ape_ptr, ape_stride, RATIO, DIM, D
                    )
            else:
                pooled = _pool_rows(
                    source_ptr, projected_ptr, projected_stride, ape_ptr, ape_stride, state_ptr,
                    state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
                )  # fmt: skip
            store_entry(
                pooled, loc, norm, eps, cos, sin, turned, table_ptr, table_stride, DIM, ROPE, ROUNDING,
                KIND, PLANE_ROWS, D,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_state_rows"])
def state_kernel(
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    ape_row_ptr,
    state_loc_ptr,
    state_ptr,
    state_stride,
    num_tokens,
    num_state_rows,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the raw rows of SPAN tokens a program, behind the launch that reads those that they replace."""
    store_raw_of_span(
        tl.program_id(0) * SPAN, num_tokens, projected_ptr, projected_stride, ape_ptr, ape_stride,
        ape_row_ptr, state_loc_ptr, state_ptr, state_stride, num_state_rows, 2 * DIM, SPAN, ROWS, COLS, PDL,
    )  # fmt: skip
