"""RMSNorm: the parameter; the arithmetic is a kernel's (spec/architecture.md section 0)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.kernels.base import KernelSet
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


class RMSNorm(OfficialModule):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = frozen_parameter(torch.ones(dim))

    def forward(self, x: Tensor, kernels: KernelSet) -> Tensor:
        """x [..., D] -> the same shape and dtype."""
        return kernels.norm.norm(x, self.weight, self.eps)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        yield "weight", OfficialTensor(self.weight, "bf16")
