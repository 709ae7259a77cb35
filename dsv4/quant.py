"""The one quantiser: power-of-two scales, fp8 (e4m3) and fp4 (e2m1) blocks, weight tiles, Hadamard.

Sources: architecture.md section 7 (what is rounded, and how), checkpoint.md (stored forms).
Everything is plain torch, the same on every device, with fixed shapes and without a host sync.

| form | codes | one fp32 power-of-two scale covers |
|---|---|---|
| fp8 blocks | float8_e4m3fn | `block` neighbours of the last dim; the last block may be short |
| fp4 blocks | uint8, one e2m1 code each | the same |
| packed fp4 | uint8, two e2m1 codes, low nibble = even index | the same |
| tiles | float8_e4m3fn | `tile` x `tile` of a weight; edge tiles may be smaller |

e2m1: bit 3 is the sign, bits 0-2 count 0, 0.5, 1, 1.5, 2, 3, 4, 6. E8M0 is one byte,
2^(byte - 127), 255 = NaN.

A NaN quantises as 0 and an infinity as the largest code, so that no NaN code is ever stored: look
for NaNs in front of the quantiser, not behind it.
"""

# N blocks or tiles of the last dim, M tiles of the dim before it, O weight outputs, I weight inputs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.errors import ConfigError

FP8 = torch.float8_e4m3fn
FP32_MAX = torch.finfo(torch.float32).max
FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6 * 2.0**-126
WEIGHT_TILE = 128

_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()


def pow2_ceil(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of positive normal values, fp32, exact: taken from the exponent bits."""
    bits = x.float().contiguous().view(torch.int32)
    # Adding the full mantissa mask carries into the exponent unless the mantissa is zero.
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def encode_e8m0(scale: Tensor) -> Tensor:
    """Exponent byte (uint8, same shape) of fp32 powers of two from 2^-126 to 2^127."""
    return ((scale.contiguous().view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """fp32 value 2^(byte - 127) of uint8 or float8_e8m0fnu codes, same shape; byte 255 is NaN."""
    byte = codes.view(torch.uint8).int()
    # Byte 0 is 2^-127, subnormal: the top mantissa bit alone. Byte 255 needs that bit to be NaN.
    bits = (byte << 23).clamp(min=0x400000) | ((byte == 255).int() << 22)
    return bits.view(torch.float32)


def decode_fp8(codes: Tensor) -> Tensor:
    """fp32 values of e4m3 codes (float8_e4m3fn or their uint8 bytes), same shape."""
    if codes.device.type != "cpu":
        return codes.view(FP8).float()
    # Four times as fast as torch's own cast on a CPU, from the values of that cast.
    index = codes.view(torch.uint8).reshape(-1).int()
    return _E4M3_VALUES.index_select(0, index).view(codes.shape)


def quantize_fp8(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes (float8_e4m3fn, shape of x) and scales (fp32, [..., ceil(d / block)]).

    Source: architecture.md 7.2. The scale is max(amax, 1e-4) / 448 rounded up to a power of two;
    codes round to nearest even.
    """
    blocks, scale = _scaled_blocks(x, block, FP8_AMAX_FLOOR, FP8_MAX)
    return _join_blocks(blocks, x.shape[-1]).to(FP8), scale


def dequantize_fp8(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """fp32 values, shape of codes."""
    return _apply_scale(decode_fp8(codes), scale, block)


def round_fp8(x: Tensor, block: int = 64) -> Tensor:
    """x as fp8 blocks would give it back; same shape and dtype."""
    codes, scale = quantize_fp8(x, block)
    return dequantize_fp8(codes, scale, block).to(x.dtype)


def quantize_fp4(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Codes (uint8 0..15, shape of x) and scales (fp32, [..., ceil(d / block)]).

    Source: architecture.md 7.3. The scale is max(amax, 6 * 2^-126) / 6 rounded up to a power of
    two; ties go to the even code and a zero keeps its sign.
    """
    blocks, scale = _scaled_blocks(x, block, FP4_AMAX_FLOOR, FP4_MAX)
    return encode_fp4(_join_blocks(blocks, x.shape[-1])), scale


def dequantize_fp4(codes: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """fp32 values, shape of codes (one code per byte)."""
    return _apply_scale(decode_fp4(codes), scale, block)


def round_fp4(x: Tensor, block: int = 32) -> Tensor:
    """x as fp4 blocks would give it back; same shape and dtype."""
    codes, scale = quantize_fp4(x, block)
    return dequantize_fp4(codes, scale, block).to(x.dtype)


def encode_fp4(x: Tensor) -> Tensor:
    """Nearest e2m1 code (uint8) of values within +-6; ties to the even code, -0.0 is code 8."""
    size = x.abs()
    # Codes are evenly spaced inside an octave: half-to-even rounding breaks ties by code parity.
    code = torch.where(
        size < 2,
        (size * 2).round(),
        torch.where(size < 4, size.round() + 2, (size / 2).round() + 4),
    )
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_fp4(codes: Tensor) -> Tensor:
    """fp32 values of e2m1 codes (uint8 0..15), same shape."""
    code = (codes & 7).float()
    size = torch.where(code < 4, code * 0.5, torch.where(code < 6, code - 2, code * 2 - 8))
    return torch.where(codes >= 8, -size, size)


def pack_fp4(codes: Tensor) -> Tensor:
    """Two codes per byte, uint8 [..., d / 2]: the even index in the low nibble."""
    if codes.shape[-1] % 2:
        raise ConfigError(
            f"fp4 codes: {codes.shape[-1]} values cannot be packed in pairs; "
            "pad the last dim to an even width"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Codes (uint8, [..., 2 * bytes]) of packed bytes; int8 is reinterpreted."""
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 15, byte >> 4), -1).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim (a power of two), Sylvester order, times d^-0.5.

    Same shape and dtype; computed in fp32 (float64 for float64 input) as a butterfly of strides
    1, 2, 4, ... with one multiplication at the end: the order is part of the result's bits.
    Source: architecture.md 7.3.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ConfigError(
            f"hadamard: width {width} is no power of two; "
            "use kv_quant none or another index_head_dim"
        )
    y = _compute(x)
    stride = 1
    while stride < width:
        pairs = y.reshape(*x.shape[:-1], width // (2 * stride), 2, stride)
        even, odd = pairs.unbind(-2)
        y = torch.stack((even + odd, even - odd), -2).flatten(-3)
        stride *= 2
    return y.mul(width**-0.5).to(x.dtype)


def quantize_tiles(weight_OI: Tensor, tile: int = WEIGHT_TILE) -> tuple[Tensor, Tensor]:
    """Codes (float8_e4m3fn [O, I]) and scales (fp32 [ceil(O / tile), ceil(I / tile)]) of a weight.

    The smallest power-of-two scale that saturates nothing, without the floor of activations: exact
    whenever any power-of-two scale is. An all-zero tile has scale 1. Source: checkpoint.md.
    """
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -inputs % tile, 0, -outputs % tile))
    tiles = padded.view(-(-outputs // tile), tile, -(-inputs // tile), tile)
    amax_MN = tiles.abs().amax((1, 3))
    scale_MN = torch.where(
        amax_MN > 0, pow2_ceil((amax_MN * (1 / FP8_MAX)).clamp(min=2.0**-126)), 1.0
    )
    codes = (tiles / scale_MN[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    # float8 has no slicing kernels everywhere; its bytes do.
    joined = codes.view(torch.uint8).flatten(2).flatten(0, 1)[:outputs, :inputs]
    return joined.contiguous().view(FP8), scale_MN


def dequantize_tiles(weight_OI: Tensor, scale_MN: Tensor, tile: int = WEIGHT_TILE) -> Tensor:
    """fp32 [O, I]: e4m3 codes times the scale of their tile; edge tiles may be smaller."""
    outputs, inputs = weight_OI.shape
    wide = (
        scale_MN.float().repeat_interleave(tile, 0)[:outputs].repeat_interleave(tile, 1)[:, :inputs]
    )
    return decode_fp8(weight_OI) * wide


def _compute(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _split_blocks(x: Tensor, block: int) -> Tensor:
    missing = -x.shape[-1] % block
    padded = F.pad(x, (0, missing)) if missing else x
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)


def _join_blocks(blocks: Tensor, width: int) -> Tensor:
    joined = blocks.flatten(-2)
    return joined if joined.shape[-1] == width else joined[..., :width]


def _scaled_blocks(x: Tensor, block: int, floor: float, limit: float) -> tuple[Tensor, Tensor]:
    """Blocks divided by their scale and clamped to +-limit [..., N, block], and scales [..., N]."""
    blocks = _split_blocks(_compute(x).nan_to_num(nan=0.0), block)
    # Always from an fp32 amax: in float64 limit * (1 / limit) may exceed 1.
    amax = blocks.abs().amax(-1).float().clamp(floor, FP32_MAX)
    scale = pow2_ceil(amax * (1 / limit))
    return (blocks / scale.unsqueeze(-1)).clamp(-limit, limit), scale


def _apply_scale(values: Tensor, scale: Tensor, block: int) -> Tensor:
    return _join_blocks(_split_blocks(values, block) * scale.unsqueeze(-1), values.shape[-1])
