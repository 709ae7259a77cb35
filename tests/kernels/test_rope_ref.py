"""Rotation in plain torch: what the store, query and attention kernels are held against."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.kernels.rope_ref import rotate
from dsv4.metadata.plans import RopeTable
from dsv4.testing import reference
from dsv4.testing.kernel_setup import rope_table
from dsv4.testing.memory import same_bytes, strided

CPU = torch.device("cpu")
POSITIONS = [0, 1, 2, 77, 100_000]


def _expected(x: Tensor, rope: RopeTable, *, inverse: bool = False) -> Tensor:
    """Each vector rotated by the table's own angles, float64."""
    angles = torch.atan2(rope.sin_TP.double(), rope.cos_TP.double()).tolist()
    sign = -1 if inverse else 1
    heads = x.unsqueeze(1) if x.dim() == 2 else x
    rows = [
        [reference.rotated(h, [sign * a for a in angles[t]]) for h in token]
        for t, token in enumerate(heads.double().tolist())
    ]
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def close(actual: Tensor, wanted: Tensor, tolerance: float = 2e-5) -> bool:
    return torch.allclose(actual.double(), wanted.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8), (5, 1, 11), (5, 2, 6)])
def test_pairs_of_the_last_channels_turn_and_the_others_pass(shape: tuple[int, ...]) -> None:
    rope = rope_table(POSITIONS, [1.0, 0.1, 0.003], CPU)
    x = randn(*shape)
    for given in (x, strided(x)):
        out = rotate(given, rope)
        assert close(out, _expected(x, rope))
        assert same_bytes(out[..., :-6], x[..., :-6])
    assert not torch.isnan(x).any(), "the input was overwritten"


def test_no_tokens_are_rotated_to_no_tokens() -> None:
    assert rotate(randn(0, 2, 8), rope_table([], [1.0], CPU)).shape == (0, 2, 8)


def test_inverse_undoes_it() -> None:
    rope = rope_table(POSITIONS, [1.0, 0.1, 0.003], CPU)
    x = randn(5, 3, 10)
    assert close(rotate(x, rope, inverse=True), _expected(x, rope, inverse=True))
    assert close(rotate(rotate(x, rope), rope, inverse=True), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_arithmetic_is_fp32_or_wider_and_the_result_has_the_dtype_of_the_input(
    dtype: torch.dtype,
) -> None:
    rope = rope_table(POSITIONS, [1.0, 0.1, 0.003], CPU)
    x = randn(5, 3, 8).to(dtype)
    out = rotate(x, rope)
    assert out.dtype == dtype
    # one rounding at the end, half a step of the dtype
    assert close(out, _expected(x, rope), 5 * 2.0**-8 if dtype == torch.bfloat16 else 2e-5)
