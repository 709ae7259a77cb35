"""The Triton RMSNorm against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.kernels.norm_triton import TritonNorm
from dsv4.testing.memory import same_bytes, strided

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _wanted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    width=st.sampled_from([1, 2, 7, 64, 100, 513, 1536, 7168]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dense=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_norm_is_x_over_its_root_mean_square_times_weight(
    shape: list[int], width: int, dtype: torch.dtype, dense: bool, scale: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (scale * torch.randn(*shape, width, generator=generator)).to(dtype).to(DEVICE)
    weight = torch.randn(width, generator=generator).to(DEVICE)
    out = TritonNorm().norm(x if dense else strided(x), weight, 1e-6)
    wanted = _wanted(x, weight, 1e-6)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert out.is_contiguous()
    step = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    error = (out.double() - wanted).abs()
    assert bool((error <= 1.01 * step * wanted.abs() + 1e-6).all()), error.max()


def test_columns_may_be_strided() -> None:
    x = torch.randn(6, 4, device=DEVICE)
    weight = torch.ones(6, device=DEVICE)
    dense = TritonNorm().norm(x.T.contiguous(), weight, 1e-6)
    assert same_bytes(TritonNorm().norm(x.T, weight, 1e-6), dense)


@pytest.mark.parametrize("width", [100, 7168])
def test_a_row_depends_on_that_row_alone(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, width, generator=generator).bfloat16().to(DEVICE)
    weight = torch.randn(width, generator=generator).to(DEVICE)
    wide = torch.full((5, width + 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 4:-4] = x
    together = TritonNorm().norm(wide[:, 4:-4], weight, 1e-6)
    for row in range(5):
        alone = TritonNorm().norm(x[row : row + 1], weight, 1e-6)
        assert same_bytes(alone[0], together[row])


def test_zeros_stay_zeros_and_a_nan_stays_in_its_row() -> None:
    x = torch.ones(3, 12, device=DEVICE)
    x[0], x[1, 3] = 0, torch.nan
    out = TritonNorm().norm(x, torch.ones(12, device=DEVICE), 1e-6)
    assert not out[0].any()
    assert bool(out[1].isnan().all())
    torch.testing.assert_close(out[2], torch.ones(12, device=DEVICE))
