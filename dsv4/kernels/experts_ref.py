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
        # ascending expert order: the sum of a token's experts is the same in any batch
        used = sorted(picks_of)
        sizes = [len(picks_of[e]) for e in used]
        picks = torch.tensor(
            [p for e in used for p in picks_of[e]], dtype=torch.int64, device=device
        )
        rows = picks // topk
        gate_up = self._grouped(x_TD.index_select(0, rows), sizes, used, w13_EID)
        inner = swiglu(gate_up, limit) * weights_TK.flatten().index_select(0, picks).unsqueeze(-1)
        out = self._grouped(inner.to(x_TD.dtype), sizes, used, w2_EDI)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=device)
        return y_TD.index_add_(0, rows, out)

    def _grouped(self, x: Tensor, sizes: list[int], used: list[int], weight_EOK: Tensor) -> Tensor:
        """Consecutive runs of rows, each times its expert's weight; fp32."""
        if not used:
            return x.new_zeros(0, weight_EOK.shape[1], dtype=torch.float32)
        runs = zip(x.split(sizes), used, strict=True)
        return torch.cat([self._linear(run, weight_EOK[e]) for run, e in runs]).float()
