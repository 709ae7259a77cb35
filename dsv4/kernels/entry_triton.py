"""Device functions that both compressors share: raw rows of tokens, and a pooled entry's way into its table.

D lanes of a tile (a power of two). A raw row is `kv | gate + position bias`, fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from dsv4.kernels.rows_triton import rounded, store_rows
from dsv4.kernels.tile_triton import load_rope, rotate

# The interpreter knows no libdevice.
_INTERPRETING = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def exp(x):
    """The exponential of the device's C library: torch folds with the same one when a pool exports its state."""
    if _INTERPRETING:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def append(tiles, tile):
    """A tuple of tiles and one more: how an unrolled loop keeps what it loads."""
    return tiles + (tile,)


@triton.jit
def only_if(flag, mask):
    """`flag & mask` of a scalar flag and a tile's mask: the interpreter would make integers of them."""
    return tl.where(flag, mask, False)


@triton.jit
def tree_sum(x, N: tl.constexpr, D: tl.constexpr):
    """Sums [N] over D lanes, neighbours first. The order is part of the bits: left to the compiler it would follow the
    tile's layout, which may differ between kernels and row formats."""
    for step in tl.static_range(0, 16):
        if (1 << step) < D:
            x = tl.sum(tl.reshape(x, [N, D >> (step + 1), 2]), 2)
    return tl.reshape(x, [N])


@triton.jit
def find_raw(
    source, projected_ptr, projected_stride, state_ptr, state_stride, num_state_rows, num_tokens
):
    """(address of a raw row, whether it is one of this forward's tokens, whether it is a row at all)."""
    live = (source >= 0) & (source < num_state_rows + num_tokens)
    own = live & (source >= num_state_rows)
    row = tl.where(own, source - num_state_rows, tl.where(live, source, 0)).to(tl.int64)
    base = tl.where(own, projected_ptr, state_ptr)
    return base + row * tl.where(own, projected_stride, state_stride), own, live


@triton.jit
def wait_for_launch(PDL: tl.constexpr):
    """A launch with PDL starts while the one in front of it runs: every program of it waits here before it writes, or
    reads what that one writes. Launches behind this one may start then."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def store_raw(
    first,
    end,
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    ape_row_ptr,
    state_loc_ptr,
    state_ptr,
    state_stride,
    num_state_rows,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the raw rows of the tokens [first, min(first + ROWS, end)) that have a state row; with PDL what is written
    is loaded before the launch in front has ended."""
    token = first + tl.arange(0, ROWS)
    inside = token < end
    loc = tl.load(state_loc_ptr + token, mask=inside, other=-1)
    ape_row = tl.load(ape_row_ptr + token, mask=inside, other=0)
    ok = ((loc >= 0) & (loc < num_state_rows))[:, None]
    source = projected_ptr + token.to(tl.int64)[:, None] * projected_stride
    target = state_ptr + loc.to(tl.int64)[:, None] * state_stride
    bias = ape_ptr + ape_row.to(tl.int64)[:, None] * ape_stride
    values = ()
    gates = ()
    for start in tl.static_range(0, CHANNELS, COLS):
        lane = start + tl.arange(0, COLS)[None, :]
        mask = ok & (lane < CHANNELS)
        values = append(values, tl.load(source + lane, mask=mask, other=0.0))
        gate = tl.load(source + CHANNELS + lane, mask=mask, other=0.0)
        gates = append(gates, gate + tl.load(bias + lane, mask=mask, other=0.0))
    wait_for_launch(PDL)
    for i in tl.static_range((CHANNELS + COLS - 1) // COLS):
        lane = i * COLS + tl.arange(0, COLS)[None, :]
        mask = ok & (lane < CHANNELS)
        tl.store(target + lane, values[i], mask=mask)
        tl.store(target + CHANNELS + lane, gates[i], mask=mask)


@triton.jit
def store_raw_of_span(
    first,
    end,
    projected_ptr,
    projected_stride,
    ape_ptr,
    ape_stride,
    ape_row_ptr,
    state_loc_ptr,
    state_ptr,
    state_stride,
    num_state_rows,
    CHANNELS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`store_raw` of the tokens [first, min(first + SPAN, end)), ROWS at a time: of a chunk only a request's last
    tokens have a state row."""
    token = first + tl.arange(0, SPAN)
    loc = tl.load(state_loc_ptr + token, mask=token < end, other=-1)
    ok = (loc >= 0) & (loc < num_state_rows)
    behind = tl.max(tl.where(ok, token + 1, 0), 0)
    begin = tl.min(tl.where(ok, token, behind), 0)
    store_raw(
        begin, behind, projected_ptr, projected_stride, ape_ptr, ape_stride, ape_row_ptr, state_loc_ptr,
        state_ptr, state_stride, num_state_rows, CHANNELS, ROWS, COLS, PDL,
    )  # fmt: skip
    for more in range(begin + ROWS, behind, ROWS):
        store_raw(
            more, behind, projected_ptr, projected_stride, ape_ptr, ape_stride, ape_row_ptr,
            state_loc_ptr, state_ptr, state_stride, num_state_rows, CHANNELS, ROWS, COLS, False,
        )  # fmt: skip


@triton.jit
def load_norm(norm_ptr, DIM: tl.constexpr, D: tl.constexpr):
    """Weights [1, D] of the norm."""
    lane = tl.arange(0, D)[None, :]
    return tl.load(norm_ptr + lane, mask=lane < DIM, other=0.0)


@triton.jit
def load_rotation(
    entry, ok, cos_ptr, sin_ptr, DIM: tl.constexpr, ROPE: tl.constexpr, D: tl.constexpr
):
    """(cos, sin, turned) of row `entry` of the rope table as `rotate` takes them; not used without ROPE."""
    if ROPE:
        row = tl.zeros([1], tl.int32) + entry
        return load_rope(cos_ptr, sin_ptr, row, only_if(ok, row == entry), DIM - ROPE, ROPE, D)
    else:
        return 0.0, 0.0, False


@triton.jit
def store_entry(
    pooled,
    loc,
    norm,
    eps,
    cos,
    sin,
    turned,
    table_ptr,
    table_stride,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Norm, rotate, round and store pooled channels [D] as row `loc`, a legal one. `norm`, `cos`, `sin` and `turned`
    are loaded by the caller, long before they are needed."""
    nope: tl.constexpr = DIM - ROPE
    lane = tl.arange(0, D)[None, :]
    x = tl.reshape(pooled, [1, D])
    if DIM < D:  # where the sum of weights may be 0
        x = tl.where(lane < DIM, x, 0.0)
    mean = tl.div_rn(tree_sum(x * x, 1, D), tl.full([1], DIM, tl.float32))
    scale = tl.div_rn(tl.full([1], 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    x = x * scale[:, None] * norm
    row = tl.zeros([1], tl.int32)
    if ROPE:
        x = rotate(x, cos, sin, turned, 1, D, nope % 2)
    x = rounded(x, ROUNDING, KIND, DIM, nope, 1, D)
    store_rows(table_ptr, table_stride, row + loc, row == 0, x, KIND, DIM, nope, PLANE_ROWS, 1, D)
