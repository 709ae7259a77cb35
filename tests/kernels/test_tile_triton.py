"""Device functions of a tile against `dsv4.quant`, bit for bit: every GPU and the interpreter must agree with it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4 import quant
from dsv4.kernels.tile_triton import (
    cast,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    fp4_scale,
    fp8_scale,
    hadamard,
    load_rope,
    rotate,
    round_bf16,
    round_fp4,
    round_fp8,
    scaled_fp4,
    scaled_fp8,
    to_fp32,
)

ROWS = 16


@triton.jit
def _tile_kernel(
    x_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    lane = tl.arange(0, D)[None, :]
    place = tl.arange(0, N)[:, None] * D + lane
    x = tl.load(x_ptr + place)
    keep = lane < WIDTH
    if OP == "bf16":
        y = round_bf16(x)
    elif OP == "hadamard":
        y = hadamard(x, N, D)
    elif OP == "fp8":
        y = round_fp8(x, keep, N, D, 64)
    elif OP == "fp8 row":
        y = round_fp8(x, keep, N, D, D)
    elif OP == "fp4":
        y = round_fp4(tl.where(keep, x, 0.0), N, D)
    tl.store(out_ptr + place, y)


@triton.jit
def _codes_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    FORM: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, D)[None, :]
    row = tl.arange(0, N)[:, None]
    x = tl.load(x_ptr + row * D + lane)
    if FORM == "fp8":
        scale = fp8_scale(x, lane < D, N, D, BLOCK)
        code = encode_e4m3(scaled_fp8(x, scale, N, D, BLOCK))
    else:
        scale = fp4_scale(x, lane < D, N, D, BLOCK)
        code = encode_e2m1(scaled_fp4(x, scale, N, D, BLOCK))
    tl.store(code_ptr + row * D + lane, code.to(tl.uint8))
    blocks: tl.constexpr = D // BLOCK if D > BLOCK else 1
    block = tl.arange(0, blocks)[None, :]
    tl.store(scale_ptr + row * blocks + block, scale)


@triton.jit
def _decode_kernel(out_ptr, FORM: tl.constexpr, NUM: tl.constexpr):
    code = tl.arange(0, NUM)
    if FORM == "e4m3":
        y = decode_e4m3(code)
    elif FORM == "e2m1":
        y = decode_e2m1(code)
    else:
        y = decode_e8m0(code)
    tl.store(out_ptr + code, y)


@triton.jit
def _e8m0_kernel(scale_ptr, out_ptr, NUM: tl.constexpr):
    lane = tl.arange(0, NUM)
    tl.store(out_ptr + lane, encode_e8m0(tl.load(scale_ptr + lane)))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, NUM: tl.constexpr):
    lane = tl.arange(0, NUM)
    x = to_fp32(tl.load(x_ptr + lane))
    tl.store(out_ptr + lane, cast(x, out_ptr.dtype.element_ty))


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    out_ptr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    line = tl.arange(0, N)
    lane = tl.arange(0, D)[None, :]
    row = tl.load(row_ptr + line)
    cos, sin, turned = load_rope(cos_ptr, sin_ptr, row, row >= 0, NOPE, ROPE, D)
    place = line[:, None] * D + lane
    y = rotate(tl.load(x_ptr + place), cos, sin, turned, N, D, NOPE % 2)
    tl.store(out_ptr + place, y)


def _hard_values(width: int, device: torch.device) -> Tensor:
    """[16, width]: all magnitudes, any bits, zeros of both signs, NaN, infinities, ties, subnormals."""
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = randn(ROWS, width) * torch.exp2(
        torch.randint(-140, 120, (ROWS, 1), generator=generator).float()
    )
    x[1] = randn(width)
    bits = torch.randint(-(2**31), 2**31, (width,), generator=generator)
    x[2] = bits.to(torch.int32).view(torch.float32)
    x[3], x[4] = 0, -0.0
    x[5, ::3], x[6, ::5], x[7, ::7] = torch.nan, torch.inf, -torch.inf
    x[8], x[9] = torch.arange(width) / 16, torch.arange(width) / 2**12
    x[10] = 1e-7 * randn(width)
    x[11] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    x[12] = 448 * torch.rand(width, generator=generator)
    x[13] = randn(width) * 2.0**-128
    x[14] = 2.0**-149
    return x.to(device)


def _same(actual: Tensor, wanted: Tensor) -> None:
    differ = actual.view(torch.int32) != wanted.view(torch.int32)
    differ &= ~(actual.isnan() & wanted.isnan())
    assert not differ.any(), differ.nonzero()[:5].tolist()


@pytest.mark.parametrize("width", [32, 128, 512])
def test_rounding_a_tile_gives_the_quantisers_bits(width: int, device: torch.device) -> None:
    x = _hard_values(width, device)
    for op, reference in {
        "bf16": lambda x: x.bfloat16().float(),
        "hadamard": quant.hadamard,
        "fp8": quant.round_fp8,
        "fp8 row": lambda x: quant.round_fp8(x, width),
        "fp4": quant.round_fp4,
    }.items():
        out = torch.empty_like(x)
        _tile_kernel[(1,)](x, out, op, ROWS, width, width)
        _same(out, reference(x))


@pytest.mark.parametrize("width", [7, 64, 71, 100])
def test_lanes_behind_the_width_neither_count_nor_change(width: int, device: torch.device) -> None:
    x = _hard_values(128, device)
    out = torch.empty_like(x)
    _tile_kernel[(1,)](x, out, "fp8", ROWS, 128, width)
    _same(out, torch.cat([quant.round_fp8(x[:, :width]), x[:, width:]], -1))
    _tile_kernel[(1,)](x, out, "fp4", ROWS, 128, width)
    _same(out[:, :width], quant.round_fp4(x[:, :width]))


@pytest.mark.parametrize(
    ("form", "width", "block"), [("fp8", 128, 64), ("fp8", 32, 64), ("fp4", 128, 32)]
)
def test_codes_and_scales_are_the_quantisers(
    form: str, width: int, block: int, device: torch.device
) -> None:
    x = _hard_values(width, device)
    codes, scale = (quant.quantize_fp8 if form == "fp8" else quant.quantize_fp4)(x, block)
    out, out_scale = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(scale)
    _codes_kernel[(1,)](x, out, out_scale, form, ROWS, width, block)
    assert torch.equal(out, codes.view(torch.uint8))
    _same(out_scale, scale)


def test_every_code_decodes_to_the_quantisers_value(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    for form, wanted in (
        ("e4m3", quant.decode_fp8(codes)),
        ("e8m0", quant.decode_e8m0(codes)),
        ("e2m1", quant.decode_fp4(codes[:16])),
    ):
        out = torch.empty_like(wanted)
        _decode_kernel[(1,)](out, form, wanted.numel())
        _same(out, wanted)


def test_the_exponent_byte_of_every_power_of_two_is_the_quantisers(device: torch.device) -> None:
    scale = torch.exp2(torch.arange(-126, 2, device=device).float())
    out = torch.empty(128, dtype=torch.int32, device=device)
    _e8m0_kernel[(1,)](scale, out, 128)
    assert torch.equal(out, quant.encode_e8m0(scale).int())


def test_casts_to_bf16_round_half_to_even_and_back_exactly(device: torch.device) -> None:
    x = _hard_values(512, device).flatten()
    half = torch.empty_like(x, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, half, x.numel())
    wanted = x.bfloat16()
    assert torch.equal(half.nan_to_num().view(torch.int16), wanted.nan_to_num().view(torch.int16))
    assert torch.equal(half.isnan(), wanted.isnan())
    wide = torch.empty_like(x)
    _cast_kernel[(1,)](half, wide, x.numel())
    _same(wide, half.float())


@pytest.mark.parametrize(
    ("nope", "rope", "width"), [(10, 6, 16), (3, 8, 16), (0, 8, 8), (7, 10, 32)]
)
def test_rope_turns_its_pairs_and_passes_the_rest_bit_for_bit(
    nope: int, rope: int, width: int, device: torch.device
) -> None:
    rows = torch.tensor([4, 0, -1, 2], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, width, generator=generator).to(device)
    angle = torch.randn(5, rope // 2, generator=generator)
    out = torch.empty_like(x)
    _rope_kernel[(1,)](
        x, angle.cos().to(device), angle.sin().to(device), rows, out, nope, rope, 4, width
    )
    wanted = x.cpu().double()
    for line, row in enumerate(rows.tolist()):
        for pair in range(rope // 2 if row >= 0 else 0):
            turn = torch.polar(torch.tensor(1.0).double(), angle[row, pair].double())
            lane = slice(nope + 2 * pair, nope + 2 * pair + 2)
            turned = torch.view_as_complex(wanted[line, lane].clone()) * turn
            wanted[line, lane] = torch.view_as_real(turned)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-6, rtol=0)
    assert torch.equal(out[:, :nope], x[:, :nope])
    assert torch.equal(out[:, nope + rope :], x[:, nope + rope :])
    assert torch.equal(out[2], x[2])
