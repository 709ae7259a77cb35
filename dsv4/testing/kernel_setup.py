"""What the op suites share: the fixture that a third party gives, and inputs that are easy to get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

from dsv4.metadata.plans import RopeTable
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, PackedFp8Rows, PlainRows, RowFormat

Kernel = TypeVar("Kernel")

NO_ROWS = (-(2**31), -(2**31) + 1, -2, -1, 2**31 - 2, 2**31 - 1)
"""Index data that is no row of any table."""

Randn = Callable[..., Tensor]

ROW_FORMATS: dict[str, Callable[[int, int], RowFormat]] = {
    "fp32": lambda dim, rope_dim: PlainRows(torch.float32, dim),
    "bf16": lambda dim, rope_dim: PlainRows(torch.bfloat16, dim),
    "fp8": lambda dim, rope_dim: PackedFp8Rows(dim, rope_dim),
}
INDEX_FORMATS: dict[str, Callable[[int], RowFormat]] = {
    "fp32": lambda dim: PlainRows(torch.float32, dim),
    "bf16": lambda dim: PlainRows(torch.bfloat16, dim),
    "fp8": IndexFp8Rows,
    "fp4": IndexFp4Rows,
}


class KernelSetup(Generic[Kernel]):
    """Base of the suites that a kernel is given to."""

    tolerance = 2e-5
    """Largest error of an fp32 result of size about 1 against float64."""

    @pytest.fixture
    def kernel(self) -> Kernel:
        """The one fixture to give: the op's implementation."""
        raise NotImplementedError(
            f"{type(self).__name__}: give a fixture kernel that returns the op"
        )

    @pytest.fixture
    def device(self) -> torch.device:
        """Where the op runs; give another one to test it there."""
        return torch.device("cpu")

    @pytest.fixture
    def randn(self, device: torch.device) -> Randn:
        """randn(*shape) -> fp32, the same numbers in every run."""
        generator = torch.Generator().manual_seed(0)
        return lambda *shape: torch.randn(*shape, generator=generator).to(device)

    def close(self, actual: Tensor, wanted: Any, *, scale: float = 1.0) -> None:
        """Within `tolerance` times the scale of the values; no NaN is close to anything but equal infinities are."""
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        actual = actual.detach().cpu().double()
        assert actual.shape == wanted.shape, (
            f"shape {tuple(actual.shape)}, not {tuple(wanted.shape)}"
        )
        error = torch.where(actual == wanted, 0.0, (actual - wanted).abs())
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= self.tolerance * scale, f"error {worst:.3g} at {int(error.argmax())}"


def ints(values: Sequence[int], device: torch.device) -> Tensor:
    """int32 on the device."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def rope_table(positions: Sequence[int], turns: Sequence[float], device: torch.device) -> RopeTable:
    """fp32 tables of the angles position * turn, computed in float64."""
    angles = [[position * turn for turn in turns] for position in positions]
    shape = (len(positions), len(turns))

    def table(function: Callable[[float], float]) -> Tensor:
        flat = [function(angle) for row in angles for angle in row]
        return torch.tensor(flat, dtype=torch.float64).view(shape).float().to(device)

    return RopeTable(table(math.cos), table(math.sin))


def within_a_step(actual: Tensor, wanted: Tensor, *, step: float, share: float = 0.02) -> None:
    """Rounded values against the rounding of float64 results: equal but for the few that lie on a border, and those
    within `step` of the row's largest value."""
    actual, wanted = actual.detach().cpu().double(), wanted.detach().cpu().double()
    assert actual.shape == wanted.shape
    error = (actual - wanted).abs()
    size = wanted.abs().amax(-1, keepdim=True)
    assert bool((error <= step * size + 1e-6).all()), f"error {error.max().item():.3g}"
    off = (error > 1e-5 * size + 1e-6).double().mean().item() if error.numel() else 0.0
    assert off <= share, f"{off:.1%} of the values are a step off"
