"""The quantiser against the golden primitives, exhaustive code tables and brute force."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import quant
from dsv4.errors import ConfigError

FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(scope="module")
def primitives(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "quant" / "primitives.safetensors")


def same_bits(got: Tensor, wanted: Tensor) -> bool:
    """Equal dtype, shape and bytes: tells -0.0 from 0.0."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    got, wanted = got.contiguous(), wanted.contiguous()
    return torch.equal(got.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))


def e4m3_value(code: int) -> Fraction:
    """Value of a finite e4m3 code from the format's definition."""
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(1, 64)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e4m3_nearest(value: Fraction) -> Fraction:
    """Nearest finite e4m3 value; a tie goes to the even code."""
    codes = [*range(0x7F), *range(0x80, 0xFF)]
    best = min(codes, key=lambda c: (abs(e4m3_value(c) - value), c & 1))
    return e4m3_value(best)


@pytest.mark.parametrize("block", [64, 128])
def test_fp8_blocks_equal_the_golden_bits(primitives: dict[str, Tensor], block: int) -> None:
    codes, scale = quant.quantize_fp8(primitives["x"], block)
    assert same_bits(codes.view(torch.uint8), primitives[f"fp8_b{block}.codes"])
    assert same_bits(scale, primitives[f"fp8_b{block}.scale_f32"])
    assert same_bits(quant.encode_e8m0(scale), primitives[f"fp8_b{block}.scale_e8m0"])
    sim = primitives[f"fp8_b{block}.sim"]
    assert same_bits(quant.round_fp8(primitives["x"], block), sim)
    assert same_bits(quant.dequantize_fp8(codes, scale, block).bfloat16(), sim)


def test_fp4_blocks_equal_the_golden_bits(primitives: dict[str, Tensor]) -> None:
    codes, scale = quant.quantize_fp4(primitives["x"])
    assert same_bits(codes, primitives["fp4_b32.codes"])
    assert same_bits(scale, primitives["fp4_b32.scale_f32"])
    assert same_bits(quant.round_fp4(primitives["x"]), primitives["fp4_b32.sim"])
    assert same_bits(quant.dequantize_fp4(codes, scale).bfloat16(), primitives["fp4_b32.sim"])


def test_fp4_ties_go_to_the_even_code_and_zero_keeps_its_sign(
    primitives: dict[str, Tensor],
) -> None:
    assert same_bits(quant.encode_fp4(primitives["e2m1.in"]), primitives["e2m1.codes"])


def test_hadamard_equals_the_golden_bits(primitives: dict[str, Tensor]) -> None:
    got = quant.hadamard(primitives["hadamard128.in"].float())
    assert same_bits(got, primitives["hadamard128.out"])


def test_weight_tiles_equal_the_golden_bits(primitives: dict[str, Tensor]) -> None:
    codes = primitives["w_fp8.codes"].view(torch.float8_e4m3fn)
    scale = quant.decode_e8m0(primitives["w_fp8.scale_e8m0"])
    assert same_bits(quant.dequantize_tiles(codes, scale), primitives["w_fp8.dequant"])


def test_packed_fp4_weights_equal_the_golden_bits(primitives: dict[str, Tensor]) -> None:
    codes = quant.unpack_fp4(primitives["w_fp4.packed"])
    scale = quant.decode_e8m0(primitives["w_fp4.scale_e8m0"])
    assert same_bits(quant.dequantize_fp4(codes, scale), primitives["w_fp4.dequant"])
    assert same_bits(quant.pack_fp4(codes).view(torch.int8), primitives["w_fp4.packed"])


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_quantised_linear_equals_golden(primitives: dict[str, Tensor], form: str) -> None:
    x = quant.round_fp8(primitives["linear.x"].float(), 128).double()
    y = x @ primitives[f"w_{form}.dequant"].double().T
    torch.testing.assert_close(y.float(), primitives[f"linear.y_{form}"], rtol=1e-5, atol=0)


def test_every_fp8_code_decodes_like_its_definition_and_like_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = quant.decode_fp8(codes)
    torch.testing.assert_close(
        got, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True
    )
    finite = [c for c in range(256) if c & 0x7F != 0x7F]
    assert [Fraction(v) for v in got[finite].tolist()] == [e4m3_value(c) for c in finite]
    assert got[[0x7F, 0xFF]].isnan().all()
    assert same_bits(quant.decode_fp8(codes.view(torch.float8_e4m3fn)), got)


def test_nan_codes_are_never_emitted() -> None:
    hard = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 448.0, 449.0, 464.0, 480.0, 1e-45, -0.0]
    x = torch.tensor([[value, *([1.0] * 63)] for value in hard])
    for source in (x, x.bfloat16(), x.double()):
        codes, scale = quant.quantize_fp8(source, 64)
        assert (codes.view(torch.uint8) & 0x7F != 0x7F).all()
        assert scale.isfinite().all()
        nibbles, scale = quant.quantize_fp4(source)
        assert (nibbles <= 15).all()
        assert scale.isfinite().all()


@pytest.mark.parametrize("exponent", range(-20, 11))
def test_values_are_quantised_with_the_scale_that_is_stored(exponent: int) -> None:
    gen = torch.Generator().manual_seed(exponent + 100)
    amax = 2.0**exponent * (1 + torch.rand(16, 1, generator=gen))
    x = (torch.rand(16, 64, generator=gen) * 2 - 1) * amax
    codes, scale = quant.quantize_fp8(x, 64)
    stored = quant.decode_e8m0(quant.encode_e8m0(scale))
    q = quant.decode_fp8(codes)
    assert q.abs().max() <= 448
    ulp = torch.exp2((x / stored).abs().clamp(min=2.0**-6).log2().floor() - 3) * stored
    assert ((q * stored - x).abs() <= ulp / 2).all()


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_pow2_ceil_is_the_smallest_power_of_two_above(value: float) -> None:
    mantissa, exponent = math.frexp(value)
    wanted = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
    assert quant.pow2_ceil(torch.tensor([value])).item() == wanted


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=8), st.integers(-6, 6))
def test_fp8_rounding_is_nearest_even_of_the_exact_quotient(
    values: list[float], shift: int
) -> None:
    values = [v * 2.0**shift for v in values]
    x = torch.tensor(values)
    codes, scale = quant.quantize_fp8(x, 64)
    step = Fraction(scale.item())
    amax = max(Fraction(1e-4), *(abs(Fraction(v)) for v in values))
    assert step / 2 < amax / 448 * (1 + Fraction(1, 2**22))
    assert step >= amax / 448 * (1 - Fraction(1, 2**22))
    got = [Fraction(v) for v in quant.decode_fp8(codes).tolist()]
    assert got == [e4m3_nearest(Fraction(v) / step) for v in values]


@given(st.floats(-6, 6, width=32))
def test_fp4_rounding_is_nearest_even(value: float) -> None:
    code = int(quant.encode_fp4(torch.tensor([value])).item())
    best = min(range(8), key=lambda c: (abs(Fraction(FP4_VALUES[c]) - abs(Fraction(value))), c & 1))
    assert code & 7 == best
    assert code >> 3 == (math.copysign(1, value) < 0)


def test_every_fp4_code_decodes_to_its_value() -> None:
    wanted = torch.tensor(FP4_VALUES + [-v for v in FP4_VALUES])
    assert same_bits(quant.decode_fp4(torch.arange(16, dtype=torch.uint8)), wanted)


def test_every_e8m0_byte_decodes_to_its_power_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = quant.decode_e8m0(codes)
    assert got[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert got[255].isnan()
    assert torch.equal(quant.encode_e8m0(got[1:255]), codes[1:255])
    assert torch.equal(quant.decode_e8m0(codes.view(torch.float8_e8m0fnu))[:255], got[:255])


def test_the_low_nibble_is_the_even_index() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert quant.pack_fp4(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(quant.unpack_fp4(torch.tensor([[0x21, 0x0F]], dtype=torch.uint8)), codes)
    with pytest.raises(ConfigError, match="3 values"):
        quant.pack_fp4(codes[:, :3])


@pytest.mark.parametrize(("width", "block"), [(48, 64), (100, 64), (65, 64), (40, 32), (1, 32)])
def test_a_short_last_block_has_a_scale_of_its_own(width: int, block: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 5
    pieces = x.split(block, -1)
    for quantize in (quant.quantize_fp8, quant.quantize_fp4):
        codes, scale = quantize(x, block)
        parts = [quantize(piece.contiguous(), piece.shape[-1]) for piece in pieces]
        assert same_bits(
            codes.view(torch.uint8), torch.cat([c.view(torch.uint8) for c, _ in parts], -1)
        )
        assert same_bits(scale, torch.cat([s for _, s in parts], -1))
    assert quant.round_fp8(x, block).shape == x.shape


def test_float64_input_is_rounded_in_float64() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rounded in (quant.round_fp8(x), quant.round_fp4(x)):
        assert rounded.dtype == torch.float64
    assert torch.equal(quant.round_fp8(x.float().double()), quant.round_fp8(x.float()).double())
    # 448 / 448 must stay a scale of 1 in every precision.
    assert quant.quantize_fp8(torch.tensor([448.0], dtype=torch.float64), 64)[1].item() == 1


def test_no_rows_quantise_to_no_rows() -> None:
    x = torch.empty(0, 80)
    assert quant.round_fp8(x).shape == (0, 80)
    assert quant.round_fp4(x).shape == (0, 80)
    assert quant.hadamard(torch.empty(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("width", [1, 2, 32, 128])
def test_hadamard_is_the_sylvester_matrix(width: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        top = torch.cat((matrix, matrix), 1)
        matrix = torch.cat((top, torch.cat((matrix, -matrix), 1)), 0)
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(quant.hadamard(x), x @ matrix * width**-0.5, rtol=1e-12, atol=1e-12)
    assert quant.hadamard(x.bfloat16()).dtype == torch.bfloat16


def test_hadamard_refuses_a_width_that_is_no_power_of_two() -> None:
    with pytest.raises(ConfigError, match="width 48"):
        quant.hadamard(torch.zeros(1, 48))


@pytest.mark.parametrize("shape", [(128, 128), (192, 256), (130, 5), (1, 300)])
def test_tiles_of_representable_weights_round_trip_exactly(shape: tuple[int, int]) -> None:
    gen = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 127, shape, generator=gen, dtype=torch.uint8)
    tiles = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.exp2(torch.randint(-30, 10, tiles, generator=gen).float())
    weight = quant.dequantize_tiles(codes.view(torch.float8_e4m3fn), scale)
    again, fitted = quant.quantize_tiles(weight)
    assert again.shape == shape
    assert fitted.shape == tiles
    assert torch.equal(quant.dequantize_tiles(again, fitted), weight)


def test_an_all_zero_tile_has_scale_one() -> None:
    codes, scale = quant.quantize_tiles(torch.zeros(3, 130))
    assert torch.equal(scale, torch.ones(1, 2))
    assert (codes.view(torch.uint8) == 0).all()
