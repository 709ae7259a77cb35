"""The float64 loops themselves, on numbers known from elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.kernels.base import Rounding
from dsv4.testing import reference


def test_the_code_tables_are_those_of_the_formats() -> None:
    assert len(reference.E4M3) == 127
    assert reference.E4M3[:3] == [0.0, 2.0**-9, 2.0**-8]
    assert reference.E4M3[-2:] == [416.0, 448.0]
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.double().tolist() == reference.E4M3


@pytest.mark.parametrize(
    ("x", "wanted"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
     (5.1, 6.0), (9.0, 6.0), (-0.25, -0.0), (-2.6, -3.0), (6.0, 6.0)],
)  # fmt: skip
def test_ties_go_to_the_even_code(x: float, wanted: float) -> None:
    got = reference.nearest(x, reference.E2M1)
    assert got == wanted
    assert math.copysign(1, got) == math.copysign(1, wanted)


def test_a_block_takes_the_smallest_power_of_two_that_saturates_nothing() -> None:
    # 449 / 448 rounds up to a scale of 2, so 447 becomes 2 * 224; the second block has a scale of its own
    rounded = reference.block_rounded(
        [449.0, 447.0, 1.0], block=2, codes=reference.E4M3, floor=1e-4
    )
    assert rounded == [448.0, 448.0, 1.0]


def test_hadamard_of_a_unit_vector_is_its_row_of_signs() -> None:
    assert reference.hadamard([0.0, 1.0, 0.0, 0.0]) == [0.5, -0.5, 0.5, -0.5]
    assert reference.rounded([1.0, 2.0], Rounding.NONE, rope_dim=0) == [1.0, 2.0]


def test_pooling_is_a_softmax_per_channel() -> None:
    gates = [[0.0, 500.0], [math.log(3), 0.0]]
    assert reference.pooled(gates, [[4.0, 1.0], [8.0, 9.0]]) == pytest.approx([7.0, 1.0])


def test_the_rope_part_is_not_rounded_to_fp8() -> None:
    x = [0.3] * 64 + [0.3, 0.7]
    rounded = reference.rounded(x, Rounding.FP8, rope_dim=2)
    assert rounded[64:] == [0.3, 0.7]
    assert rounded[0] == pytest.approx(0.3125)
