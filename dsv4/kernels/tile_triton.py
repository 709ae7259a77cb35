"""Device functions on fp32 tiles [N, D]: RoPE, Hadamard, and the quantiser of `dsv4.quant` bit for bit.

N and D are powers of two. fp8 and fp4 codes are made by integer arithmetic: the bits are the same on every GPU, also
where e4m3 does not exist in hardware, and in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter cuts fp32 off where a GPU rounds to bf16, and loses bf16 subnormals.
_INTERPRETING = tl.constexpr(bool(triton.knobs.runtime.interpret))

_FP32_MAX = tl.constexpr(3.4028234663852886e38)
_FP8_LIMIT = tl.constexpr(448.0)
_FP8_FLOOR = tl.constexpr(1e-4)
_FP4_LIMIT = tl.constexpr(6.0)
_FP4_FLOOR = tl.constexpr(6 * 2.0**-126)


@triton.jit
def to_fp32(x):
    """Any float tile as fp32, exact."""
    if _INTERPRETING and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """An fp32 tile as DTYPE (fp32, bf16, fp16), rounded to nearest even. Use it at every store."""
    if _INTERPRETING and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def round_bf16(x):
    """The nearest bf16 value, as fp32."""
    return to_fp32(cast(x, tl.bfloat16))


@triton.jit
def rotate(x, cos, sin, turned, N: tl.constexpr, D: tl.constexpr, ODD: tl.constexpr = 0):
    """RoPE of interleaved pairs: (a, b) -> (a cos - b sin, b cos + a sin); pairs that are not turned pass bit for bit.

    cos, sin fp32 [N or 1, D / 2]; turned bool [1, D / 2]. ODD = 1: pairs are channels (1, 2), (3, 4), ..., as where the
    channels in front of the rotated ones are odd in number. Negate sin for the inverse.
    """
    if ODD:
        lane = tl.arange(0, D)[None, :] + tl.zeros([N, 1], tl.int32)
        x = tl.gather(x, (lane + 1) % D, 1)
    a, b = tl.split(tl.reshape(x, [N, D // 2, 2]))
    # Explicit: left to the compiler, which product is fused could differ between kernels.
    turned_a = tl.fma(-b, sin, a * cos)
    turned_b = tl.fma(a, sin, b * cos)
    y = tl.join(tl.where(turned, turned_a, a), tl.where(turned, turned_b, b))
    y = tl.reshape(y, [N, D])
    if ODD:
        y = tl.gather(y, (lane + D - 1) % D, 1)
    return y


@triton.jit
def load_rope(cos_ptr, sin_ptr, row, ok, NOPE: tl.constexpr, ROPE: tl.constexpr, D: tl.constexpr):
    """(cos [N, D / 2], sin, turned [1, D / 2]) of table rows [N] for `rotate`, where ROPE channels behind NOPE turn.

    Tables are dense [tokens, ROPE / 2]. Pass ODD = NOPE % 2 to `rotate`.
    """
    pair = tl.arange(0, D // 2)[None, :] - NOPE // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    place = row.to(tl.int64)[:, None] * (ROPE // 2) + pair
    mask = ok[:, None] & turned
    cos = tl.load(cos_ptr + place, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + place, mask=mask, other=0.0)
    return cos, sin, turned


@triton.jit
def hadamard(x, N: tl.constexpr, D: tl.constexpr):
    """Walsh-Hadamard over all D lanes, butterflies of strides 1, 2, 4, ..., then one multiplication by D**-0.5."""
    y = x
    for step in tl.static_range(0, 16):
        if (1 << step) < D:
            even, odd = tl.split(tl.reshape(y, [N, D // 2, 2]))
            # The finished bit of the lane number moves to the front, so that the next stride is 1 again; after all
            # steps every bit is back in its place.
            y = tl.permute(tl.join(even + odd, even - odd), (0, 2, 1))
            y = tl.reshape(y, [N, D])
    return y * (D**-0.5)


@triton.jit
def pow2_ceil(x):
    """2^ceil(log2 x) of positive normal values."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def encode_e8m0(scale):
    """Exponent byte (int32) of fp32 powers of two."""
    return (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF


@triton.jit
def decode_e8m0(byte):
    """fp32 2^(byte - 127) of an int32 byte; 255 is NaN."""
    # Byte 0 is 2^-127, subnormal: the top mantissa bit alone. Byte 255 needs that bit to be NaN.
    bits = tl.maximum(byte << 23, 0x400000) | tl.where(byte == 255, 0x400000, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round_size(size, STEP: tl.constexpr, KEPT: tl.constexpr):
    """Bits of sizes >= 0 rounded to KEPT mantissa bits, half to even; and of sizes below 1 / STEP-grid numbers
    `size` rounded to a multiple of STEP."""
    bits = size.to(tl.int32, bitcast=True)
    cut: tl.constexpr = 23 - KEPT
    normal = (bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) & (-1 << cut)
    # The sum's last mantissa bit counts STEPs, so the addition rounds.
    magic: tl.constexpr = STEP * 2.0**23
    small = ((size + magic) - magic).to(tl.int32, bitcast=True)
    return tl.where(size < STEP * (1 << KEPT), small, normal)


@triton.jit
def _signed(bits, x):
    return (bits | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def nearest_e4m3(x):
    """The nearest e4m3 value of |x| <= 448, half to even."""
    return _signed(_round_size(tl.abs(x), 2.0**-9, 3), x)


@triton.jit
def nearest_e2m1(x):
    """The nearest e2m1 value of |x| <= 6, half to even."""
    return _signed(_round_size(tl.abs(x), 0.5, 1), x)


@triton.jit
def encode_e4m3(x):
    """Nearest e4m3fn code (int32 0..255) of |x| <= 448, half to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # In steps of 2^-9, the distance of subnormal codes.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size < 2.0**-6, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(byte):
    """fp32 of e4m3fn codes (int32 0..255); codes 0x7F and 0xFF are NaN."""
    size = byte & 0x7F
    # As fp32 exponent and mantissa 2^120 too small; subnormal codes come out as scaled fp32 subnormals.
    value = (size << 20).to(tl.float32, bitcast=True) * 2.0**120
    bits = value.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)
    bits = tl.where(size == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """Nearest e2m1 code (int32 0..15) of |x| <= 6, half to even; -0.0 is code 8."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x1FFFFF + ((size_bits >> 22) & 1)) >> 22) - (126 << 1)
    small = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(size < 1.0, small, normal) | ((bits >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """fp32 of e2m1 codes (int32 0..15)."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
    bits = value.to(tl.int32, bitcast=True) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _finite(x):
    """NaN as 0, infinities as the largest fp32."""
    return tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -_FP32_MAX), _FP32_MAX)


@triton.jit
def _scale(
    x,
    keep,
    FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block: tl.constexpr = BLOCK if BLOCK < D else D
    size = tl.abs(tl.where(keep, _finite(x), 0.0))
    amax = tl.max(tl.reshape(size, [N, D // block, block]), 2)
    return pow2_ceil(tl.maximum(amax, FLOOR) * (1 / LIMIT))


@triton.jit
def fp8_scale(x, keep, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Power-of-two scales [N, max(D / BLOCK, 1)]; `keep` [1 or N, D]: lanes that count."""
    return _scale(x, keep, _FP8_FLOOR, _FP8_LIMIT, N, D, BLOCK)


@triton.jit
def fp4_scale(x, keep, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """As `fp8_scale`, for e2m1."""
    return _scale(x, keep, _FP4_FLOOR, _FP4_LIMIT, N, D, BLOCK)


@triton.jit
def spread(scale, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One value a block [N, max(D / BLOCK, 1)] as one value a lane [N, D]."""
    block: tl.constexpr = BLOCK if BLOCK < D else D
    wide = tl.broadcast_to(tl.expand_dims(scale, 2), [N, D // block, block])
    return tl.reshape(wide, [N, D])


@triton.jit
def _scaled(x, scale, LIMIT: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    # The reciprocal of a power of two is exact: the product has the bits of the quotient.
    inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    y = _finite(x) * spread(inverse, N, D, BLOCK)
    return tl.minimum(tl.maximum(y, -LIMIT), LIMIT)


@triton.jit
def scaled_fp8(x, scale, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """x over its block's scale, within +-448: what `encode_e4m3` takes."""
    return _scaled(x, scale, _FP8_LIMIT, N, D, BLOCK)


@triton.jit
def scaled_fp4(x, scale, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """x over its block's scale, within +-6: what `encode_e2m1` takes."""
    return _scaled(x, scale, _FP4_LIMIT, N, D, BLOCK)


@triton.jit
def round_fp8(x, keep, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """x as e4m3 blocks give it back; lanes outside `keep` [1 or N, D] stay as they are and do not count."""
    scale = fp8_scale(x, keep, N, D, BLOCK)
    y = nearest_e4m3(scaled_fp8(x, scale, N, D, BLOCK)) * spread(scale, N, D, BLOCK)
    return tl.where(keep, y, x)


@triton.jit
def round_fp4(x, N: tl.constexpr, D: tl.constexpr):
    """x as e2m1 blocks of 32 give it back; lanes behind the row must be 0."""
    scale = fp4_scale(x, tl.full([1, D], True, tl.int1), N, D, 32)
    return nearest_e2m1(scaled_fp4(x, scale, N, D, 32)) * spread(scale, N, D, 32)
