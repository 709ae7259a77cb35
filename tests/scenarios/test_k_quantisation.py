"""Class K: values are quantised with the scale that is stored, in one format per component."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.base import Region
from dsv4.quant import decode_fp8, dequantize_fp8, quantize_fp8
from tests import run_on
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.reference import Reference
from tests.scenarios.weights import tiny_decoder, weights_of


@scenario("K", 41)
@pytest.mark.parametrize("exponent", range(-20, 11))
def test_the_error_of_a_stored_value_is_half_a_step_of_its_stored_scale(exponent: int) -> None:
    rng = run_on.generator(exponent + 100)
    amax = 2.0**exponent * (1 + 0.97 * torch.rand(64, 1, generator=rng))
    x = amax * (2 * torch.rand(64, 64, generator=rng) - 1)
    x[:, 0] = amax[:, 0]
    codes, scale = quantize_fp8(x, 64)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all(), "stored scales are powers of two"
    size = codes.float().abs()
    assert size.max() <= 448
    # e4m3: 3 mantissa bits, steps of 2^-9 below 2^-6
    step = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-6))) - 3) * scale
    assert ((dequantize_fp8(codes, scale, 64) - x).abs() <= step / 2).all()
    if exponent > math.log2(1e-4):
        assert size.amax(-1).min() >= 224, "the scale is no larger than needed"


@scenario("K", 42)
def test_all_256_byte_codes_decode_as_torch_decodes_e4m3fn() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(decode_fp8(codes), expected, rtol=0, atol=0, equal_nan=True)


@scenario("K", 42)
def test_the_encoder_never_stores_a_nan_code() -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, 448.0, 1e30, -1e30, math.inf, -math.inf, math.nan])
    for x in (values, values * 1e-4, torch.full((64,), math.nan)):
        codes, _ = quantize_fp8(x.unsqueeze(0), 64)
        assert decode_fp8(codes).isfinite().all()


@scenario("K", 43)
def test_keys_and_values_cannot_have_two_formats(family: type[PoolConfig]) -> None:
    """One vector is key and value, so there is one setting for it."""
    sizes = {"max_requests": 2, "max_context": 64}
    with pytest.raises(TypeError):
        family(**sizes, value_format="bf16")
    document = family(**sizes, row_format="fp8").to_document()
    for unknown in ("v_format", "value_row_format", "cache_type_v"):
        with pytest.raises(ConfigError, match=unknown):
            family.from_document(document | {unknown: "bf16"}, "config")
    session = Session(family, tiny_decoder(kv_quant="official"), row_format="fp8")
    for layer in (1, 2):
        window, entries = (session.pool.view(layer, r) for r in (Region.WINDOW, Region.ENTRIES))
        assert window.format == entries.format


@scenario("K", 41)
@pytest.mark.parametrize("row_format", ["fp32", "bf16", "fp8"])
def test_stored_rows_are_what_a_recompute_rounds(family: type[PoolConfig], row_format: str) -> None:
    """With official rounding: fp32 rows keep fp32 rope channels; bf16 and packed fp8 rows hold the same values."""
    decoder = tiny_decoder(kv_quant="official")
    dtype = torch.float32 if row_format == "fp32" else torch.bfloat16
    reference = Reference(decoder.config, weights_of(decoder), row_dtype=dtype)
    sequence = truth(40, decoder=decoder)
    run = reference.run(sequence.ids)
    session = Session(family, decoder, row_format=row_format, index_format="bf16")
    slot = session.open()
    session.feed_one(slot, sequence.ids)
    layer_0 = session.window_rows(slot, 0, range(24, 40))
    assert_same(layer_0, run.window_kv[0][24:])
    # deeper layers read logits-sized noise of rounded rows: a value near a tie may round the other way
    for layer, ratio in ((1, 4), (2, 16)):
        rows = session.entry_rows(slot, layer, Region.ENTRIES, 40 // ratio)
        off = (rows - run.entries[layer]).abs() > 1e-4
        assert off.float().mean() < 0.01
