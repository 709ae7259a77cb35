"""RMSNorm: fp32 statistics, weight multiplied in fp32, one cast at the end (spec/architecture.md section 0)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] of any float dtype, weight [D] -> x's shape and dtype."""
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class RMSNorm(OfficialModule):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = frozen_parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        yield "weight", OfficialTensor(self.weight, "bf16")
