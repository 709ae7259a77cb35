"""Manifold-constrained hyper-connections (spec/architecture.md section 2): streams mixed around each sub-block.

Legend: T tokens, N streams, D hidden. Everything here is fp32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dsv4.kernels.base import LinearKernel, MixKernel, MixWeights
from dsv4.kernels.norm_ref import rms_norm

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


def sinkhorn(
    logits_TNN: Tensor, *, iterations: int, eps: float, few_tokens: int = FEW_TOKENS
) -> Tensor:
    """fp32 [T, N, N] -> doubly stochastic, columns normalised last."""
    comb_TNN = torch.softmax(logits_TNN, -1).add_(eps)
    few = comb_TNN.shape[0] <= few_tokens
    return (normalise_few if few else normalise_many)(comb_TNN, eps, iterations)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): torch.sigmoid rounds differently in the tail of its vector loop, so its result for a token
    would depend on how many tokens stand before it."""
    return torch.exp(-x).add_(1).reciprocal_()


def weighted_sum(weights_TN: Tensor, streams_TND: Tensor) -> Tensor:
    return torch.bmm(weights_TN.unsqueeze(1), streams_TND).squeeze(1)


@lru_cache(maxsize=16)
def scale_of_rows(num_streams: int, device: torch.device) -> Tensor:
    """Which of the three scales each row of `fn` takes."""
    n = num_streams
    return torch.tensor([0] * n + [1] * n + [2] * n * n, device=device)


class TorchMix(MixKernel):
    """`linear`: the set's GEMM, so that a set is row-invariant as a whole."""

    def __init__(self, linear: LinearKernel, *, deterministic: bool = False) -> None:
        self._linear = linear.linear
        self._few_tokens = 0 if deterministic else FEW_TOKENS

    def pre(
        self,
        streams_TND: Tensor,
        weights: MixWeights,
        *,
        norm: Tensor,
        eps: float,
        hc_eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = streams_TND.shape[1]
        streams32_TND, z = self._logits(streams_TND, weights, eps)
        scale = weights.scale.index_select(0, scale_of_rows(n, z.device))
        mix = torch.addcmul(weights.base, z, scale)
        gates = sigmoid(mix[:, : 2 * n])
        pre_TN, post_TN = gates[:, :n] + hc_eps, 2 * gates[:, n:]
        logits_TNN = mix[:, 2 * n :].reshape(-1, n, n)
        comb_TNN = sinkhorn(
            logits_TNN, iterations=iterations, eps=hc_eps, few_tokens=self._few_tokens
        )
        x_TD = weighted_sum(pre_TN, streams32_TND).to(streams_TND.dtype)
        return rms_norm(x_TD, norm, eps), post_TN, comb_TNN

    def post(self, y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
        scaled = post_TN.unsqueeze(-1) * y_TD.float().unsqueeze(1)
        mixed = torch.baddbmm(scaled, comb_TNN.transpose(1, 2), streams_TND.float())
        return mixed.to(streams_TND.dtype)

    def head(
        self, streams_TND: Tensor, weights: MixWeights, *, norm: Tensor, eps: float, hc_eps: float
    ) -> Tensor:
        streams32_TND, z = self._logits(streams_TND, weights, eps)
        weights_TN = sigmoid(z * weights.scale + weights.base) + hc_eps
        x_TD = weighted_sum(weights_TN, streams32_TND).to(streams_TND.dtype)
        return rms_norm(x_TD, norm, eps)

    def _logits(
        self, streams_TND: Tensor, weights: MixWeights, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(streams in fp32, z [T, rows of fn]): the logits before scale and base."""
        streams32_TND = streams_TND.float()
        flat = streams32_TND.flatten(1)
        scale = flat.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return streams32_TND, self._linear(flat, weights.fn) * scale
