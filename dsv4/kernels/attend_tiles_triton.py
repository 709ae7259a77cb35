"""Device functions of attend: a tile of gathered rows, its step of the running softmax, and the end of a token.

N rows of a tile, M heads, D lanes of a head (all powers of two). A tile lies in one segment (source a or b); the tiles
of a token are those of a, then those of b.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.rows_triton import FP8_BLOCK, PACKED_FP8, load_rows
from dsv4.kernels.tile_triton import decode_e4m3, decode_e8m0, to_fp32

NO_FRESH = tl.constexpr(0)
FRESH_BY_ADDRESS = tl.constexpr(1)
"""Fresh rows have the table's dtype: one load serves both, each row from its own address."""
FRESH_BY_LOAD = tl.constexpr(2)
"""They have another form: a second load, of tiles of segments that may hold fresh rows."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_TINY = tl.constexpr(1.1754943508222875e-38)
_HUGE = tl.constexpr(3.4028234663852886e38)


@triton.jit
def operand(x, DOT: tl.constexpr):
    """A tile as operand of a product. DOT is fp32 in the interpreter, which multiplies nothing else correctly."""
    if tl.float32 == DOT:
        return to_fp32(x)
    return x.to(DOT)


@triton.jit
def tile_indices(tile, lists, SOURCES: tl.constexpr, N: tl.constexpr):
    """Indices [N] of a tile, -1 behind the segment's end."""
    tiles_a, a_indices, a_start, a_end, b_indices, b_start, b_end = lists
    indices = a_indices
    start = a_start + tile * N
    end = a_end
    if SOURCES == 2:
        in_b = tile >= tiles_a
        indices = tl.where(in_b, b_indices, a_indices)
        start = tl.where(in_b, b_start + (tile - tiles_a) * N, start)
        end = tl.where(in_b, b_end, a_end)
    lane = start + tl.arange(0, N)
    return tl.load(indices + lane, mask=lane < end, other=-1)


@triton.jit
def is_row(index, limit):
    """Which of [N] indices are rows of a table of `limit` rows (fresh ones among them): one unsigned compare."""
    return index.to(tl.uint32, bitcast=True) < limit.to(tl.uint32, bitcast=True)


@triton.jit
def load_plain(
    segment, index, ok, ROW_DIM: tl.constexpr, FRESH: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """A tile [N, D] of plain rows in their own dtype, 0 where not ok [N]. ALIGNED: every row starts at 16 bytes."""
    table, stride, num_rows, fresh, fresh_stride, _ = segment
    start = table + index.to(tl.int64) * stride
    if FRESH == FRESH_BY_ADDRESS:
        behind = index >= num_rows
        row = tl.where(behind, index - num_rows, index).to(tl.int64)
        start = tl.where(behind, fresh, table) + row * tl.where(behind, fresh_stride, stride)
        if ALIGNED:
            # known of both, and lost on the way through the choice
            start = tl.multiple_of(start, 16)
    lane = tl.arange(0, D)[None, :]
    mask = ok[:, None]
    if D != ROW_DIM:
        mask &= lane < ROW_DIM
    return tl.load(start[:, None] + lane, mask=mask, other=0.0)


@triton.jit
def load_packed(
    segment, index, ok, NOPE: tl.constexpr, PLANE_ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The parts of a tile of packed fp8 rows, as they are stored: codes [D / 64, N, 64], the rotated channels
    [1, N, 64], and the scale bytes of a row as one word [N]. Rows that are not ok give 0.

    Blocks come first, so that one thread holds lanes of every block of its row: then which lanes are codes and which
    are rotated channels is known when the kernel is compiled.
    """
    table, stride, _, _, _, _ = segment
    data_nbytes: tl.constexpr = NOPE + 2 * FP8_BLOCK
    plane = index // PLANE_ROWS
    slot = index - plane * PLANE_ROWS
    base = table + plane.to(tl.int64) * stride
    data = (base + slot * data_nbytes)[None, :, None]
    lane = tl.arange(0, FP8_BLOCK)[None, None, :]
    block = tl.arange(0, D // FP8_BLOCK)[:, None, None]
    mask = ok[None, :, None]
    if data_nbytes < D:
        mask &= block * FP8_BLOCK < NOPE
    code = tl.load(data + block * FP8_BLOCK + lane, mask=mask, other=0)
    halves = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(halves + lane, mask=ok[None, :, None], other=0.0)
    words = (base + (PLANE_ROWS * data_nbytes + slot * 8)).to(tl.pointer_type(tl.int64))
    return code, rope, tl.load(words, mask=ok, other=0)


@triton.jit
def unpack(
    raw, NOPE: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """What `load_packed` loaded, as values in blocks [D / 64, N, 64]."""
    code, rope, word = raw
    block = tl.arange(0, D // FP8_BLOCK)[:, None, None]
    byte = (word[None, :, None] >> (8 * block).to(tl.int64)).to(tl.int32) & 0xFF
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = decode_e4m3(code.to(tl.int32))
    # a power of two times four significant bits: exact in bf16 too
    value = operand(value * decode_e8m0(byte), DOT)
    value = tl.where(block == NOPE // FP8_BLOCK, operand(rope, DOT), value)
    if NOPE + FP8_BLOCK < D:
        # lanes behind the row: what they loaded must not reach the products
        value = tl.where(block > NOPE // FP8_BLOCK, 0.0, value)
    return value


@triton.jit
def tile_of(
    raw, segment, index, KIND: tl.constexpr, FAST: tl.constexpr, NATIVE: tl.constexpr, FRESH: tl.constexpr,
    ROW_DIM: tl.constexpr, NOPE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    DOT: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The rows of a tile as one operand [N, D]: from what was loaded of them ahead, or without it."""
    table, stride, num_rows, fresh, fresh_stride, fresh_rows = segment
    if KIND != PACKED_FP8:
        k = operand(raw, DOT)
    elif FAST:
        k = unpack(raw, NOPE, NATIVE, DOT, D)
    else:
        ok = is_row(index, num_rows)
        k = operand(load_rows(table, stride, index, ok, KIND, ROW_DIM, NOPE, PLANE_ROWS, N, D), DOT)
    if FRESH == FRESH_BY_LOAD:
        if fresh_rows > 0:
            behind = (index >= num_rows) & is_row(index, num_rows + fresh_rows)
            start = fresh + (index - num_rows).to(tl.int64) * fresh_stride
            if KIND == PACKED_FP8 and FAST:
                block = tl.arange(0, D // FP8_BLOCK)[:, None, None]
                lane = block * FP8_BLOCK + tl.arange(0, FP8_BLOCK)[None, None, :]
                start = start[None, :, None]
                behind = behind[None, :, None]
            else:
                lane = tl.arange(0, D)[None, :]
                start = start[:, None]
                behind = behind[:, None]
            mask = behind
            if D != ROW_DIM:
                mask &= lane < ROW_DIM
            k = tl.where(behind, operand(tl.load(start + lane, mask=mask, other=0.0), DOT), k)
    if KIND == PACKED_FP8 and FAST:
        k = tl.reshape(tl.permute(k, (1, 0, 2)), [N, D])
    return k


@triton.constexpr_function
def mass_shape(num_heads, num_rows):
    """Lanes in which the weights of a tile [num_heads, num_rows] are summed: see `partial_sums`."""
    return [num_heads, num_rows // 32, 8] if num_rows >= 64 else [num_heads, 1, num_rows]


@triton.jit
def partial_sums(weight, M: tl.constexpr, N: tl.constexpr):
    """Weights [M, N] summed to `mass_shape`: as far as one thread holds them in a 64-row tile of wgmma."""
    if N >= 64:
        sums = tl.sum(tl.reshape(weight, [M, N // 32, 4, 8]), 2)
    else:
        sums = tl.reshape(weight, [M, 1, N])
    return sums


@triton.jit
def fold_tile(
    q, k, legal, limit, scale_log2, top, mass, acc,
    DOT: tl.constexpr, SPREAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One step of the softmax over a tile: q [M, D], k [N, D], legal [N]: which rows are some, of `limit` > 0 in all.

    -> (top [M], mass `mass_shape`, acc [M, D]). Tops are in units of log 2; mass is summed after the last tile.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SPREAD:
        # Always true. A product that leaves a branch is not known to feed another one: then wgmma spreads it over both
        # warpgroups, which exchange the weights, instead of computing all of it in each.
        if limit > 0:
            scores = tl.where(legal[None, :], scores, -float("inf"))
    else:
        scores = tl.where(legal[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    # finite, so that no difference of equal infinities arises while no row was seen
    shift = tl.where(new_top == -float("inf"), 0.0, new_top)
    # Explicit: left to the compiler, what is fused could differ between row formats.
    weight = tl.exp2(tl.fma(scores, scale_log2, -shift[:, None]))
    decay = tl.exp2(top - shift)
    mass = tl.fma(mass, decay[:, None, None], partial_sums(weight, M, N))
    acc = tl.dot(operand(weight, DOT), k, acc * decay[:, None], input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def step(
    q, raw, segment, lists, tile, limit, scale_log2, top, mass, acc,
    SOURCES: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr, NATIVE: tl.constexpr, FRESH: tl.constexpr,
    ROW_DIM: tl.constexpr, NOPE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    DOT: tl.constexpr, SPREAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile, of which `raw` was loaded ahead."""
    # Once more, for other threads: the scores' columns lie elsewhere than the rows, and a second load is cheaper than
    # an exchange.
    index = tile_indices(tile, lists, SOURCES, N)
    k = tile_of(
        raw, segment, index, KIND, FAST, NATIVE, FRESH, ROW_DIM, NOPE, PLANE_ROWS, DOT, N, D
    )
    return fold_tile(
        q, k, is_row(index, limit), limit, scale_log2, top, mass, acc, DOT, SPREAD, M, N
    )


@triton.jit
def divide(x, y):
    """x / y [M, D] and [M, 1], correctly rounded, at three multiply-adds a lane instead of a division's twelve."""
    inverse = tl.math.div_rn(1.0, y)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, y, x), inverse, quotient)


@triton.jit
def rope_back(
    x, cos_ptr, sin_ptr, first_lane, NOPE: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Inverse RoPE of lanes [first_lane, first_lane + D) of a row: of the ROPE channels behind NOPE; cos and sin of
    the token."""
    half: tl.constexpr = ROPE // 2
    # In the usual shape the turned lanes are one block of many, and a block's few angles are loaded by every thread.
    aligned: tl.constexpr = half & (half - 1) == 0 and NOPE % ROPE == 0 and D % ROPE == 0
    width: tl.constexpr = half if aligned else D // 2
    block = first_lane // (2 * width) + tl.arange(0, D // (2 * width))[None, :, None, None]
    pair = tl.arange(0, width)[None, None, :, None]
    if aligned:
        turned = block == NOPE // ROPE
        cos = tl.load(cos_ptr + pair)
        sin = -tl.load(sin_ptr + pair)
    else:
        pair += first_lane // 2 - NOPE // 2
        turned = (pair >= 0) & (pair < half)
        cos = tl.load(cos_ptr + pair, mask=turned, other=1.0)
        sin = -tl.load(sin_ptr + pair, mask=turned, other=0.0)
    # Halves of a pair as sums with 0: split and join would move the whole tile through shared memory, twice.
    pairs = tl.reshape(x, [M, D // (2 * width), width, 2])
    is_first = tl.arange(0, 2)[None, None, None, :] == 0
    a = tl.sum(tl.where(is_first, pairs, 0.0), 3, keep_dims=True)
    b = tl.sum(tl.where(is_first, 0.0, pairs), 3, keep_dims=True)
    y = tl.where(is_first, tl.fma(-b, sin, a * cos), tl.fma(a, sin, b * cos))
    return tl.reshape(tl.where(turned, y, pairs), [M, D])


@triton.jit
def finish(acc, top, mass, sink):
    """(result [M, D], natural log of the mass of the rows [M]) of weights and their sums relative to 2^top [M]."""
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = mass + tl.exp2(tl.fma(sink, LOG2_E, -shift))
    # without rows and without a sink there is no mass at all: 0 / tiny; an infinite sink takes it all: x / huge
    total = tl.minimum(tl.maximum(total, _TINY), _HUGE)
    return divide(acc, total[:, None]), (top + tl.log2(tl.maximum(mass, _TINY))) * LN_2
