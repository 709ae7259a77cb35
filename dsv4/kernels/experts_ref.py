"""Mixture of experts: routing, then tokens grouped by expert, one clamped SwiGLU per group (spec/architecture.md 4).

Legend: T tokens, D hidden, K experts a token, E experts, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import ExpertsKernel, ExpertWeights, LinearKernel

SOFTPLUS_THRESHOLD = 20.0  # as in torch: identity above


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) composed of operations whose result does not depend on a value's place in memory."""
    return torch.where(
        x > SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_THRESHOLD)))
    )


def best(scores_TE: Tensor, topk: int) -> Tensor:
    """Indices of the K highest scores of each token; the lower index wins a tie."""
    return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[:, :topk]


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of fp32 [..., 2 I]; limit 0 means no clamp.

    Composed of exp and division: torch.sigmoid and silu round differently in the tail of their vector loop, so a
    token's value would depend on how many tokens stand before it.
    """
    gate, up = gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / torch.exp(-gate).add_(1) * up


class TorchExperts(ExpertsKernel):
    """Asks the host which tokens chose an expert: simple and exact, not for graph capture."""

    def __init__(self, linear: LinearKernel) -> None:
        self._linear = linear.linear

    def route(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        *,
        topk: int,
        factor: float,
        token_ids_T: Tensor,
        bias_E: Tensor | None,
        table_VK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scores_TE = softplus(self._linear(x_TD.float(), weight_ED)).sqrt_()
        if table_VK is not None:
            chosen_TK = table_VK[token_ids_T]
        else:
            assert bias_E is not None
            chosen_TK = best(scores_TE + bias_E, topk)
        weights_TK = scores_TE.gather(-1, chosen_TK)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return chosen_TK, weights_TK * factor

    def experts(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        weights: ExpertWeights,
        *,
        limit: float,
    ) -> Tensor:
        y_TD = self._routed(x_TD, chosen_TK, weights_TK, weights, limit)
        gate_up = self._linear(x_TD, weights.shared_w13).float()
        shared = self._linear(swiglu(gate_up, limit).to(x_TD.dtype), weights.shared_w2)
        return (y_TD + shared.float()).to(x_TD.dtype)

    def _routed(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        weights: ExpertWeights,
        limit: float,
    ) -> Tensor:
        """fp32 sum over a token's experts."""
        topk, device = chosen_TK.shape[1], x_TD.device
        picks_of: dict[int, list[int]] = {}
        for pick, expert in enumerate(chosen_TK.flatten().tolist()):
            picks_of.setdefault(expert, []).append(pick)
        # ascending expert order: the sum of a token's experts is the same in any batch
        used = sorted(picks_of)
        sizes = [len(picks_of[e]) for e in used]
        picks = torch.tensor(
            [p for e in used for p in picks_of[e]], dtype=torch.int64, device=device
        )
        rows = picks // topk
        gate_up = self._grouped(x_TD.index_select(0, rows), sizes, used, weights.w13_EID)
        inner = swiglu(gate_up, limit) * weights_TK.flatten().index_select(0, picks).unsqueeze(-1)
        out = self._grouped(inner.to(x_TD.dtype), sizes, used, weights.w2_EDI)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=device)
        return y_TD.index_add_(0, rows, out)

    def _grouped(self, x: Tensor, sizes: list[int], used: list[int], weight_EOK: Tensor) -> Tensor:
        """Consecutive runs of rows, each times its expert's weight; fp32."""
        if not used:
            return x.new_zeros(0, weight_EOK.shape[1], dtype=torch.float32)
        runs = zip(x.split(sizes), used, strict=True)
        return torch.cat([self._linear(run, weight_EOK[e]) for run, e in runs]).float()
