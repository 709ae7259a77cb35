"""Routed experts: tokens grouped by expert, one clamped SwiGLU per group (spec/architecture.md section 4).

Legend: T tokens, D hidden, K experts a token, E experts, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import ExpertsKernel, LinearKernel


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

    def experts(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        w13_EID: Tensor,
        w2_EDI: Tensor,
        *,
        limit: float,
    ) -> Tensor:
        topk, device = chosen_TK.shape[1], x_TD.device
        picks_of: dict[int, list[int]] = {}
        for pick, expert in enumerate(chosen_TK.flatten().tolist()):
            picks_of.setdefault(expert, []).append(pick)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=device)
        weights = weights_TK.flatten()
        # ascending expert order: the sum of a token's experts is the same in any batch
        for expert in sorted(picks_of):
            picks = torch.tensor(picks_of[expert], device=device)
            rows = picks // topk
            gate_up = self._linear(x_TD.index_select(0, rows), w13_EID[expert]).float()
            inner = swiglu(gate_up, limit) * weights.index_select(0, picks).unsqueeze(-1)
            y_TD.index_add_(0, rows, self._linear(inner.to(x_TD.dtype), w2_EDI[expert]).float())
        return y_TD
