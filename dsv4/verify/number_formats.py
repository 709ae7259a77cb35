"""Number formats against stored codes and scales: fp8 and fp4 blocks, weight tiles, Hadamard.

Source: spec/architecture.md 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsv4 import quant
from dsv4.verify.golden import StoredTensors
from dsv4.verify.report import EXACT, PRODUCT, Check, Tolerance, compare, failed

ACTIVATION_BLOCK = 128
"""Block of the activations that meet a quantised weight."""


def check_number_formats(path: Path) -> Iterator[Check]:
    """Every result of a primitives file; bit for bit, except the products."""
    stored = StoredTensors(path)
    for name, got, tolerance in _results(stored):
        yield compare(stored.subject, name, got, stored.take(name), tolerance)
    for name in stored.untaken:
        yield failed(stored.subject, name, "unknown tensor, not checked")


def _results(stored: StoredTensors) -> Iterator[tuple[str, Tensor, Tolerance]]:
    x = stored.take("x")
    for block in (64, 128):
        codes, scale = quant.quantize_fp8(x, block)
        yield f"fp8_b{block}.codes", codes.view(torch.uint8), EXACT
        yield f"fp8_b{block}.scale_f32", scale, EXACT
        yield f"fp8_b{block}.scale_e8m0", quant.encode_e8m0(scale), EXACT
        yield f"fp8_b{block}.sim", quant.round_fp8(x, block), EXACT
    codes, scale = quant.quantize_fp4(x)
    yield "fp4_b32.codes", codes, EXACT
    yield "fp4_b32.scale_f32", scale, EXACT
    yield "fp4_b32.sim", quant.round_fp4(x), EXACT
    yield "e2m1.codes", quant.encode_fp4(stored.take("e2m1.in")), EXACT
    yield "hadamard128.out", quant.hadamard(stored.take("hadamard128.in").float()), EXACT
    yield from _weights(stored)


def _weights(stored: StoredTensors) -> Iterator[tuple[str, Tensor, Tolerance]]:
    fp8 = quant.dequantize_tiles(
        stored.take("w_fp8.codes").view(torch.float8_e4m3fn),
        quant.decode_e8m0(stored.take("w_fp8.scale_e8m0")),
    )
    yield "w_fp8.dequant", fp8, EXACT
    fp4 = quant.dequantize_fp4(
        quant.unpack_fp4(stored.take("w_fp4.packed")),
        quant.decode_e8m0(stored.take("w_fp4.scale_e8m0")),
    )
    yield "w_fp4.dequant", fp4, EXACT
    # float64: sums of this length lose more than the limit in fp32 where terms cancel
    x = quant.round_fp8(stored.take("linear.x").double(), ACTIVATION_BLOCK)
    yield "linear.y_fp8", x @ fp8.double().T, PRODUCT
    yield "linear.y_fp4", x @ fp4.double().T, PRODUCT
