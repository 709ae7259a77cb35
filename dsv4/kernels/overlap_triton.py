"""Pooling of a CSA compressor: 2 * RATIO raw rows a window, their A halves before, their B halves after the border."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.entry_triton import append, exp, find_raw, only_if, store_entry, store_raw

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
    """(gate, value) [D] of pooled token j: -inf and 0 where it is no row."""
    row, own, live = find_raw(
        source, projected_ptr, projected_stride, state_ptr, state_stride, num_state_rows, num_tokens
    )
    column = (j // RATIO) * DIM
    lane = tl.arange(0, D)
    mask = only_if(live, lane < DIM)
    value = tl.load(row + column + lane, mask=mask, other=0.0)
    gate = tl.load(row + 2 * DIM + column + lane, mask=mask, other=0.0)
    # the state's gates have their position bias already
    bias = ape_ptr + (j % RATIO) * ape_stride + column
    ape = tl.load(bias + lane, mask=only_if(own, lane < DIM), other=0.0)
    return tl.where(live, tl.where(own, gate + ape, gate), float("-inf")), value


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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Programs [0, num_closing) close a window each; those behind write the raw rows of ROWS tokens each."""
    program = tl.program_id(0)
    rows: tl.constexpr = 2 * RATIO
    if program >= num_closing:
        first = (program - num_closing) * ROWS
        store_raw(
            first, num_tokens, projected_ptr, projected_stride, ape_ptr, ape_stride, ape_row_ptr,
            state_loc_ptr, state_ptr, state_stride, num_state_rows, 2 * DIM, ROWS, COLS,
        )  # fmt: skip
    else:
        loc = tl.load(entry_loc_ptr + program)
        source_ptr += program.to(tl.int64) * rows
        sources = ()
        if rows <= RESIDENT:
            for j in tl.static_range(rows):
                sources = append(sources, tl.load(source_ptr + j))
        if (loc >= 0) & (loc < num_entry_rows):
            highest = tl.full([D], float("-inf"), tl.float32)
            total = tl.zeros([D], tl.float32)
            weighted = tl.zeros([D], tl.float32)
            if rows <= RESIDENT:
                # every load is on its way before the first is used
                gates = ()
                values = ()
                for j in tl.static_range(rows):
                    gate, value = _half(
                        j, sources[j], projected_ptr, projected_stride, ape_ptr, ape_stride,
                        state_ptr, state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
                    )  # fmt: skip
                    gates = append(gates, gate)
                    values = append(values, value)
                for j in tl.static_range(rows):
                    highest = tl.maximum(highest, gates[j])
                for j in tl.static_range(rows):
                    weight = exp(gates[j] - highest)
                    total += weight
                    weighted += weight * values[j]
            else:
                for j in range(rows):
                    gate, value = _half(
                        j, tl.load(source_ptr + j), projected_ptr, projected_stride, ape_ptr,
                        ape_stride, state_ptr, state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
                    )  # fmt: skip
                    highest = tl.maximum(highest, gate)
                for j in range(rows):
                    gate, value = _half(
                        j, tl.load(source_ptr + j), projected_ptr, projected_stride, ape_ptr,
                        ape_stride, state_ptr, state_stride, num_state_rows, num_tokens, RATIO, DIM, D,
                    )  # fmt: skip
                    weight = exp(gate - highest)
                    total += weight
                    weighted += weight * value
            store_entry(
                tl.div_rn(weighted, total), program, loc, norm_ptr, eps, cos_ptr, sin_ptr, table_ptr,
                table_stride, DIM, ROPE, ROUNDING, KIND, PLANE_ROWS, D,
            )  # fmt: skip
