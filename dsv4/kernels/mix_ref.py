"""Sinkhorn normalisation of the hyper-connections' mixing matrices (spec/architecture.md section 2).

Legend: T tokens, N streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import MixKernel

FEW_TOKENS = 32
"""Up to here a step is bound by the number of calls, beyond by the elements."""


def normalise_few(comb_TNN: Tensor, eps: float, iterations: int) -> Tensor:
    """Sums by products with ones, eps riding along: two calls a normalisation."""
    ones = torch.ones_like(comb_TNN)
    eps_TNN, sums = torch.full_like(comb_TNN, eps), torch.empty_like(comb_TNN)
    comb_TNN.div_(torch.baddbmm(eps_TNN, ones, comb_TNN, out=sums))
    for _ in range(iterations - 1):
        comb_TNN.div_(torch.baddbmm(eps_TNN, comb_TNN, ones, out=sums))
        comb_TNN.div_(torch.baddbmm(eps_TNN, ones, comb_TNN, out=sums))
    return comb_TNN


def normalise_many(comb_TNN: Tensor, eps: float, iterations: int) -> Tensor:
    """Tokens innermost, so that every operation is a long vector; a token's sums are in stream order in any batch."""
    comb_NNT = comb_TNN.permute(1, 2, 0).contiguous()
    eps_ = torch.tensor(eps, dtype=comb_NNT.dtype, device=comb_NNT.device)
    comb_NNT.div_(comb_NNT.sum(0, keepdim=True).add_(eps_))
    for _ in range(iterations - 1):
        comb_NNT.div_(comb_NNT.sum(1, keepdim=True).add_(eps_))
        comb_NNT.div_(comb_NNT.sum(0, keepdim=True).add_(eps_))
    return comb_NNT.permute(2, 0, 1).contiguous()


class TorchMix(MixKernel):
    def __init__(self, *, deterministic: bool = False) -> None:
        self._few_tokens = 0 if deterministic else FEW_TOKENS

    def sinkhorn(self, logits_TNN: Tensor, *, iterations: int, eps: float) -> Tensor:
        comb_TNN = torch.softmax(logits_TNN, -1).add_(eps)
        few = comb_TNN.shape[0] <= self._few_tokens
        return (normalise_few if few else normalise_many)(comb_TNN, eps, iterations)
