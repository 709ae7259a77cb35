"""What one measurement of an op is, and what a benchmark is given to build it from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.timing import Call
from dsv4.config import ModelConfig
from dsv4.kernels.base import KernelSet, Rounding


@frozen(kw_only=True, eq=False)
class Case:
    """One shape of one op."""

    name: str
    size: str
    calls: Sequence[Call]
    check: Callable[[], float]
    """Runs the first call on poisoned outputs and compares with float64: the largest error over the largest value."""
    tolerance: float
    nbytes: float
    """What a call must read and write, each byte once."""
    flop: float = 0.0
    fp8: bool = False
    """Whether its products may be fp8."""


@frozen(kw_only=True, eq=False)
class Setup:
    """Device, kernels and shapes of a run."""

    device: torch.device
    kernels: KernelSet
    models: dict[str, ModelConfig]
    """By name; the published dims, or small ones of the same make."""
    small: bool
    max_calls: int
    batches: tuple[int, ...]
    row_format: str
    index_format: str

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def ints(self, values: Sequence[int]) -> Tensor:
        """int32 on the device."""
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def num_calls(self, per_call: int, budget: int) -> int:
        """Calls whose shares of a budget (rows, bytes) do not overlap; at least one."""
        return max(1, min(self.max_calls, budget // max(per_call, 1)))


def kv_rounding(model: ModelConfig) -> Rounding:
    """Of window KV and entries."""
    return Rounding.FP8 if model.kv_quant == "official" else Rounding.NONE


def index_rounding(model: ModelConfig) -> Rounding:
    """Of indexer queries and keys."""
    return Rounding.HADAMARD_FP4 if model.kv_quant == "official" else Rounding.NONE


def largest_error(actual: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value; NaN counts as infinite."""
    if prod(actual.shape) == 0:
        return 0.0
    error = (actual.double() - wanted.double()).abs().nan_to_num(nan=torch.inf)
    return float(error.max() / wanted.double().abs().max().clamp_(min=1e-30))


def mean_error(actual: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of the values: for rounded ones, of which a few land on the other
    side of a border."""
    if prod(actual.shape) == 0:
        return 0.0
    error = (actual.double() - wanted.double()).square().mean().nan_to_num(nan=torch.inf)
    return float((error / wanted.double().square().mean().clamp_(min=1e-30)).sqrt())
