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
    _divide_by_sum(comb_NNT, 0, eps)
    for _ in range(iterations - 1):
        _divide_by_sum(comb_NNT, 1, eps)
        _divide_by_sum(comb_NNT, 0, eps)
    return comb_NNT.permute(2, 0, 1).contiguous()


def _divide_by_sum(comb_NNT: Tensor, dim: int, eps: float) -> None:
    # Not torch's sum: from 5 streams on it adds in another order at the end of its vector loop, so that a token's bits
    # would depend on how many tokens there are.
    first_NT, *others = comb_NNT.unbind(dim)
    total_NT = first_NT + eps
    for next_NT in others:
        total_NT += next_NT
    comb_NNT.div_(total_NT.unsqueeze(dim))


class TorchMix(MixKernel):
    def __init__(self, *, deterministic: bool = False) -> None:
        self._few_tokens = 0 if deterministic else FEW_TOKENS

    def sinkhorn(self, logits_TNN: Tensor, *, iterations: int, eps: float) -> Tensor:
        comb_TNN = torch.softmax(logits_TNN, -1).add_(eps)
        few = comb_TNN.shape[0] <= self._few_tokens
        return (normalise_few if few else normalise_many)(comb_TNN, eps, iterations)
