"""Conformance of an ExpertsKernel.

Legend: T tokens, D hidden, K experts a token, E experts, I intermediate.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.kernels.base import ExpertsKernel, ExpertWeights
from dsv4.testing import reference
from dsv4.testing.kernel_setup import KernelSetup, Randn
from dsv4.testing.memory import strided

HIDDEN, INNER, SHARED, EXPERTS = 12, 7, 7, 5


def _expected(
    x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights, limit: float
) -> Tensor:
    """Token by token and expert by expert in float64; inner vectors and the shared expert are cast to x's dtype."""
    w13, w2 = weights.w13_EID.cpu(), weights.w2_EDI.cpu()
    one = torch.zeros(len(x_TD), 1, dtype=torch.int64)
    shared = weights.shared_w13.cpu()[None], weights.shared_w2.cpu()[None]
    out_TD = _routed(x_TD, one, one + 1.0, *shared, limit).to(x_TD.dtype).double()
    return out_TD + _routed(x_TD, chosen_TK, weights_TK, w13, w2, limit)


def _routed(
    x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    x_TD, chosen_TK, weights_TK = x_TD.cpu(), chosen_TK.cpu(), weights_TK.cpu()
    inner_dim = w2.shape[-1]
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t, (x, chosen, weights) in enumerate(
        zip(x_TD.double(), chosen_TK.tolist(), weights_TK.double().tolist(), strict=True)
    ):
        for expert, weight in zip(chosen, weights, strict=True):
            gate_up = (w13[expert].double() @ x).to(x_TD.dtype).double().tolist()
            inner = []
            for gate, up in zip(gate_up[:inner_dim], gate_up[inner_dim:], strict=True):
                if limit > 0:
                    gate, up = min(gate, limit), min(max(up, -limit), limit)
                inner.append(weight * reference.silu(gate) * up)
            cast = torch.tensor(inner, dtype=torch.float64).to(x_TD.dtype).double()
            out_TD[t] += w2[expert].double() @ cast
    return out_TD


def _weights(randn: Randn, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    routed = [(EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)]
    shapes = [*routed, (2 * SHARED, HIDDEN), (HIDDEN, SHARED)]
    return ExpertWeights(*(randn(*shape).to(dtype) for shape in shapes))


class ExpertsConformance(KernelSetup[ExpertsKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize(("tokens", "topk"), [(0, 2), (1, 1), (6, 3), (40, 5)])
    def test_1_the_best_of_score_plus_bias_weighted_by_the_score_alone(
        self, kernel: ExpertsKernel, randn: Randn, tokens: int, topk: int
    ) -> None:
        """1. Scores sqrt(softplus(x . weight)); the K best of score + bias; weights from the unbiased scores."""
        x_TD, weight_ED, bias_E = randn(tokens, HIDDEN) * 5, randn(EXPERTS, HIDDEN), randn(EXPERTS)
        ids_T = torch.zeros(tokens, dtype=torch.int64, device=x_TD.device)
        chosen_TK, weights_TK = kernel.route(
            x_TD, weight_ED, topk=topk, factor=1.5, token_ids_T=ids_T, bias_E=bias_E, table_VK=None
        )
        assert weights_TK.dtype == torch.float32
        assert chosen_TK.shape == weights_TK.shape == (tokens, topk)
        scores_TE = self._scores(x_TD, weight_ED)
        for t, biased in enumerate((scores_TE + bias_E.double().cpu()).tolist()):
            best = sorted(range(EXPERTS), key=lambda e: -biased[e])[:topk]
            chosen = chosen_TK[t].tolist()
            assert sorted(chosen) == sorted(best)
            own = scores_TE[t, chosen]
            self.close(weights_TK[t], own / own.sum() * 1.5, scale=5)

    def test_1_the_lower_expert_wins_a_tie(self, kernel: ExpertsKernel, randn: Randn) -> None:
        """1. Equal scores: a hand table."""
        x_TD, weight_ED = randn(3, HIDDEN), randn(1, HIDDEN).expand(EXPERTS, -1).contiguous()
        bias_E = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], device=x_TD.device)
        ids_T = torch.zeros(3, dtype=torch.int64, device=x_TD.device)
        for topk, wanted in ((2, [1, 2]), (4, [0, 1, 2, 4])):
            chosen_TK, weights_TK = kernel.route(
                x_TD, weight_ED, topk=topk, factor=2.0, token_ids_T=ids_T, bias_E=bias_E, table_VK=None
            )  # fmt: skip
            assert [sorted(chosen) for chosen in chosen_TK.tolist()] == [wanted] * 3
            self.close(weights_TK, torch.full((3, topk), 2.0 / topk))

    def test_1_a_table_names_the_experts_by_token_id(
        self, kernel: ExpertsKernel, randn: Randn
    ) -> None:
        """1. Hash routing: experts from the table, weights from the scores."""
        x_TD, weight_ED = randn(4, HIDDEN), randn(EXPERTS, HIDDEN)
        table_VK = torch.tensor([[0, 1], [4, 2], [3, 0]], device=x_TD.device)
        ids_T = torch.tensor([2, 0, 1, 2], device=x_TD.device)
        chosen_TK, weights_TK = kernel.route(
            x_TD, weight_ED, topk=2, factor=1.0, token_ids_T=ids_T, bias_E=None, table_VK=table_VK
        )
        assert chosen_TK.tolist() == [[3, 0], [0, 1], [4, 2], [3, 0]]
        own = self._scores(x_TD, weight_ED).gather(1, chosen_TK.long().cpu())
        self.close(weights_TK, own / own.sum(-1, keepdim=True), scale=5)

    @staticmethod
    def _scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        logits_TE = x_TD.double().cpu() @ weight_ED.double().cpu().t()
        return torch.log1p(logits_TE.exp()).sqrt()

    @pytest.mark.parametrize("limit", [0.0, 0.4, 10.0])
    @pytest.mark.parametrize(("tokens", "topk"), [(0, 2), (1, 1), (6, 2), (23, 3), (4, 5)])
    def test_2_y_is_the_weighted_sum_over_the_experts_of_each_token(
        self, kernel: ExpertsKernel, randn: Randn, limit: float, tokens: int, topk: int
    ) -> None:
        """2. y = sum_k w2 cast(p_k * silu(clamped gate) * clamped up) over a token's experts, plus the shared one."""
        x_TD = randn(tokens, HIDDEN)
        weights = _weights(randn)
        chosen_TK = randn(tokens, EXPERTS).topk(topk).indices
        weights_TK = randn(tokens, topk).abs()
        wanted_TD = _expected(x_TD, chosen_TK, weights_TK, weights, limit)
        for x in (x_TD, strided(x_TD)):
            y_TD = kernel.experts(x, chosen_TK, weights_TK, weights, limit=limit)
            assert y_TD.dtype == torch.float32
            self.close(y_TD, wanted_TD, scale=20 + 0.05 * 100)

    def test_2_the_clamp_is_one_sided_for_the_gate_and_two_sided_for_up(
        self, kernel: ExpertsKernel, device: torch.device
    ) -> None:
        """2. Gate is clamped from above alone, up on both sides: a hand table."""
        w13 = torch.zeros(1, 2, 2, device=device)
        w13[0, 0, 0] = w13[0, 1, 1] = 1.0
        w2 = torch.tensor([[[1.0], [0.0]]], device=device)
        x_TD = torch.tensor([[9.0, 1.0], [-9.0, 1.0], [1.0, 9.0], [1.0, -9.0]], device=device)
        chosen_TK = torch.zeros(4, 1, dtype=torch.int64, device=device)
        ones = torch.ones(4, 1, device=device)
        weights = ExpertWeights(w13, w2, torch.zeros_like(w13[0]), torch.zeros_like(w2[0]))
        y_TD = kernel.experts(x_TD, chosen_TK, ones, weights, limit=2.0)
        silu_2, silu_1, silu_m9 = 1.7615941559557649, 0.7310585786300049, -0.0011106086721783443
        self.close(y_TD[:, 0], [silu_2, silu_m9, 2 * silu_1, -2 * silu_1])

    def test_2_the_inner_vector_is_cast_to_the_dtype_of_x(
        self, kernel: ExpertsKernel, randn: Randn
    ) -> None:
        """2. In bf16 the inner vector is cast to bf16 and the sum over experts stays fp32."""
        x_TD = randn(9, HIDDEN).bfloat16()
        weights = _weights(randn, torch.bfloat16)
        chosen_TK = randn(9, EXPERTS).topk(2).indices
        weights_TK = randn(9, 2).abs()
        y_TD = kernel.experts(x_TD, chosen_TK, weights_TK, weights, limit=10.0)
        assert y_TD.dtype == torch.bfloat16
        wanted_TD = _expected(x_TD, chosen_TK, weights_TK, weights, 10.0)
        largest = wanted_TD.abs().max().item()
        self.close(y_TD, wanted_TD, scale=4 * 2.0**-8 * largest / self.tolerance)

    def test_2_an_expert_that_nobody_chose_is_not_read(
        self, kernel: ExpertsKernel, randn: Randn
    ) -> None:
        """2. Only a token's own experts enter: the others may hold NaN."""
        weights = _weights(randn)
        weights.w13_EID[3], weights.w2_EDI[3] = torch.nan, torch.nan
        x_TD = randn(6, HIDDEN)
        chosen_TK = torch.tensor(
            [[0, 4], [4, 1], [2, 0], [1, 2], [4, 0], [0, 1]], device=x_TD.device
        )
        weights_TK = randn(6, 2).abs()
        y_TD = kernel.experts(x_TD, chosen_TK, weights_TK, weights, limit=10.0)
        wanted_TD = _expected(x_TD, chosen_TK, weights_TK, weights, 10.0)
        self.close(y_TD, wanted_TD, scale=25)
