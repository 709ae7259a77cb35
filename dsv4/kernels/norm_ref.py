"""RMSNorm: fp32 statistics, weight multiplied in fp32, one cast at the end (spec/architecture.md section 0)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import NormKernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] of any float dtype, weight [D] -> x's shape and dtype."""
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class TorchNorm(NormKernel):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)
