"""Conformance of a MixKernel.

Legend: T tokens, N streams.
"""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.kernels.base import MixKernel
from dsv4.testing.kernel_setup import KernelSetup, Randn


def _sinkhorn(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """spec/architecture.md section 2: softmax of the rows plus eps, a column step, then row and column steps."""
    size = len(logits)
    comb = []
    for row in logits:
        weights = [math.exp(v - max(row)) for v in row]
        comb.append([w / sum(weights) + eps for w in weights])
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [sum(comb[j][k] for j in range(size)) + eps for k in range(size)]
            comb = [[comb[j][k] / sums[k] for k in range(size)] for j in range(size)]
        else:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
    return comb


class MixConformance(KernelSetup[MixKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize("tokens", [0, 1, 5, 70])
    @pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 1), (1, 2), (2, 5)])
    def test_1_row_softmax_plus_eps_then_column_and_row_steps(
        self, kernel: MixKernel, randn: Randn, tokens: int, streams: int, iterations: int
    ) -> None:
        """1. Row softmax plus eps, a column step, then iterations - 1 row and column steps, eps added to every sum."""
        eps = 1e-3  # large enough to see where it enters
        logits_TNN = randn(tokens, streams, streams) * 3
        wanted = [_sinkhorn(token, iterations, eps) for token in logits_TNN.double().tolist()]
        out_TNN = kernel.sinkhorn(logits_TNN.clone(), iterations=iterations, eps=eps)
        assert out_TNN.dtype == torch.float32
        shape = (tokens, streams, streams)
        self.close(out_TNN, torch.tensor(wanted, dtype=torch.float64).view(shape), scale=5)

    def test_2_a_tokens_result_is_a_function_of_its_own_logits(
        self, kernel: MixKernel, randn: Randn
    ) -> None:
        """2. A token's result is a function of its own logits: it is the same beside tokens of NaN, and alone."""
        logits_TNN = randn(40, 4, 4)
        whole_TNN = kernel.sinkhorn(logits_TNN.clone(), iterations=20, eps=1e-6)
        spoiled_TNN = logits_TNN.clone()
        spoiled_TNN[::2] = torch.nan
        beside_TNN = kernel.sinkhorn(spoiled_TNN, iterations=20, eps=1e-6)
        assert torch.equal(beside_TNN[1::2], whole_TNN[1::2])
        alone_TNN = kernel.sinkhorn(logits_TNN[7:8].clone(), iterations=20, eps=1e-6)
        self.close(alone_TNN, whole_TNN[7:8].cpu())
