"""Conformance of an ExpertsKernel.

Legend: T tokens, D hidden, K experts a token, E experts, I intermediate.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.kernels.base import ExpertsKernel
from dsv4.testing import reference
from dsv4.testing.kernel_setup import KernelSetup, Randn
from dsv4.testing.memory import strided

HIDDEN, INNER, EXPERTS = 12, 7, 5


def _expected(
    x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """Token by token and expert by expert in float64; the inner vector is cast to x's dtype."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t, (x, chosen, weights) in enumerate(
        zip(x_TD.double(), chosen_TK.tolist(), weights_TK.double().tolist(), strict=True)
    ):
        for expert, weight in zip(chosen, weights, strict=True):
            gate_up = (w13[expert].double() @ x).to(x_TD.dtype).double().tolist()
            inner = []
            for gate, up in zip(gate_up[:INNER], gate_up[INNER:], strict=True):
                if limit > 0:
                    gate, up = min(gate, limit), min(max(up, -limit), limit)
                inner.append(weight * reference.silu(gate) * up)
            cast = torch.tensor(inner, dtype=torch.float64).to(x_TD.dtype).double()
            out_TD[t] += (w2[expert].double() @ cast.to(w2.device)).cpu()
    return out_TD


class ExpertsConformance(KernelSetup[ExpertsKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize("limit", [0.0, 0.4, 10.0])
    @pytest.mark.parametrize(("tokens", "topk"), [(0, 2), (1, 1), (6, 2), (23, 3), (4, 5)])
    def test_1_y_is_the_weighted_sum_over_the_experts_of_each_token(
        self, kernel: ExpertsKernel, randn: Randn, limit: float, tokens: int, topk: int
    ) -> None:
        """1. y = sum_k w2 cast(p_k * silu(clamped gate) * clamped up) over a token's experts, fp32."""
        x_TD = randn(tokens, HIDDEN)
        w13, w2 = randn(EXPERTS, 2 * INNER, HIDDEN), randn(EXPERTS, HIDDEN, INNER)
        chosen_TK = randn(tokens, EXPERTS).topk(topk).indices
        weights_TK = randn(tokens, topk).abs()
        wanted_TD = _expected(x_TD.cpu(), chosen_TK, weights_TK, w13.cpu(), w2.cpu(), limit)
        for x in (x_TD, strided(x_TD)):
            y_TD = kernel.experts(x, chosen_TK, weights_TK, w13, w2, limit=limit)
            assert y_TD.dtype == torch.float32
            self.close(y_TD, wanted_TD, scale=20 + 0.05 * 100)

    def test_1_the_clamp_is_one_sided_for_the_gate_and_two_sided_for_up(
        self, kernel: ExpertsKernel, device: torch.device
    ) -> None:
        """1. Gate is clamped from above alone, up on both sides: a hand table."""
        w13 = torch.zeros(1, 2, 2, device=device)
        w13[0, 0, 0] = w13[0, 1, 1] = 1.0
        w2 = torch.tensor([[[1.0], [0.0]]], device=device)
        x_TD = torch.tensor([[9.0, 1.0], [-9.0, 1.0], [1.0, 9.0], [1.0, -9.0]], device=device)
        chosen_TK = torch.zeros(4, 1, dtype=torch.int64, device=device)
        y_TD = kernel.experts(x_TD, chosen_TK, torch.ones(4, 1, device=device), w13, w2, limit=2.0)
        silu_2, silu_1, silu_m9 = 1.7615941559557649, 0.7310585786300049, -0.0011106086721783443
        self.close(y_TD[:, 0], [silu_2, silu_m9, 2 * silu_1, -2 * silu_1])

    def test_1_the_inner_vector_is_cast_to_the_dtype_of_x(
        self, kernel: ExpertsKernel, randn: Randn
    ) -> None:
        """1. In bf16 the inner vector is cast to bf16 and the sum over experts stays fp32."""
        x_TD = randn(9, HIDDEN).bfloat16()
        w13, w2 = (
            randn(EXPERTS, 2 * INNER, HIDDEN).bfloat16(),
            randn(EXPERTS, HIDDEN, INNER).bfloat16(),
        )
        chosen_TK = randn(9, EXPERTS).topk(2).indices
        weights_TK = randn(9, 2).abs()
        y_TD = kernel.experts(x_TD, chosen_TK, weights_TK, w13, w2, limit=10.0)
        assert y_TD.dtype == torch.float32
        wanted_TD = _expected(x_TD.cpu(), chosen_TK, weights_TK, w13.cpu(), w2.cpu(), 10.0)
        largest = wanted_TD.abs().max().item()
        self.close(y_TD, wanted_TD, scale=4 * 2.0**-8 * largest / self.tolerance)

    def test_1_an_expert_that_nobody_chose_is_not_read(
        self, kernel: ExpertsKernel, randn: Randn
    ) -> None:
        """1. Only a token's own experts enter: the others may hold NaN."""
        w13, w2 = randn(EXPERTS, 2 * INNER, HIDDEN), randn(EXPERTS, HIDDEN, INNER)
        w13[3], w2[3] = torch.nan, torch.nan
        x_TD = randn(6, HIDDEN)
        chosen_TK = torch.tensor(
            [[0, 4], [4, 1], [2, 0], [1, 2], [4, 0], [0, 1]], device=x_TD.device
        )
        weights_TK = randn(6, 2).abs()
        y_TD = kernel.experts(x_TD, chosen_TK, weights_TK, w13, w2, limit=10.0)
        wanted_TD = _expected(x_TD.cpu(), chosen_TK, weights_TK, w13.cpu(), w2.cpu(), 10.0)
        self.close(y_TD, wanted_TD, scale=25)
