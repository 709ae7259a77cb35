"""Rotary frequencies against the formulas in float64 and against the released numbers."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.config import ModelConfig, YarnConfig
from dsv4.metadata.rope import inverse_frequencies, rope_table
from dsv4.testing import reference


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
@pytest.mark.parametrize("rope_dim", [2, 8, 64])
@pytest.mark.parametrize("length", [None, 64, 65_536])
def test_frequencies_follow_the_formulas(theta: float, rope_dim: int, length: int | None) -> None:
    yarn = None
    if length is not None:
        yarn = YarnConfig(
            factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=length
        )
    wanted = torch.tensor(reference.frequencies(theta, rope_dim, yarn), dtype=torch.float64)
    actual = inverse_frequencies(theta, rope_dim, yarn).double()
    assert ((actual - wanted).abs() <= 1e-6 * wanted).all()


def test_the_released_model_stretches_pairs_15_to_25() -> None:
    """lo = 15 and hi = 25: pairs up to 15 are plain, from 25 on they are 16 times slower."""
    model = ModelConfig.preset("flash")
    stretched = inverse_frequencies(160_000.0, 64, model.yarn)
    plain = inverse_frequencies(160_000.0, 64, None)
    assert torch.equal(stretched[:16], plain[:16])
    assert (stretched[16:25] < plain[16:25]).all()
    assert torch.allclose(stretched[25:] * 16, plain[25:], rtol=1e-6)


def test_a_table_holds_cos_and_sin_of_position_times_frequency() -> None:
    table = rope_table(torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1.0, 0.5]))
    assert table.cos_TP.shape == (3, 2)
    assert table.cos_TP.dtype == table.sin_TP.dtype == torch.float32
    assert table.cos_TP[0].tolist() == [1.0, 1.0]
    assert math.isclose(table.sin_TP[2, 1].item(), math.sin(1.5), rel_tol=1e-6)
    assert math.isclose(table.cos_TP[1, 0].item(), math.cos(1.0), rel_tol=1e-6)
