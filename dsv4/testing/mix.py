"""Conformance of a MixKernel.

Legend: T tokens, N streams, D hidden.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4.kernels.base import MixKernel, MixWeights
from dsv4.testing import reference
from dsv4.testing.kernel_setup import KernelSetup, Randn

EPS, HIDDEN = 1e-3, 24
SIZES = [(4, 20), (3, 1), (1, 2), (2, 5), (5, 3)]


def sinkhorn(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
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


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def weights_for(randn: Randn, streams: int, *, head: bool = False) -> MixWeights:
    rows = streams if head else (2 + streams) * streams
    fn, base = randn(rows, streams * HIDDEN) * (streams * HIDDEN) ** -0.5, randn(rows)
    return MixWeights(fn, base, randn(1 if head else 3) * 2)


def logits(flat: list[float], weights: MixWeights, scales: list[float]) -> list[float]:
    """fn . flat / rms(flat) * scale + base of one token, float64."""
    normed = reference.rms_normed(flat, EPS)
    rows = zip(weights.fn.double().tolist(), scales, weights.base.double().tolist(), strict=True)
    return [
        sum(f * v for f, v in zip(row, normed, strict=True)) * scale + base
        for row, scale, base in rows
    ]


def summed(weights: list[float], streams: list[list[float]], norm: list[float]) -> list[float]:
    columns = zip(*streams, strict=True)
    mixed = [sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns]
    return reference.rms_normed(mixed, EPS, norm)


def expected_pre(
    token: list[list[float]], weights: MixWeights, norm: list[float], iterations: int
) -> tuple[list[float], list[float], list[list[float]]]:
    """Input, post and comb of one token."""
    n = len(token)
    parts = [*[0] * n, *[1] * n, *[2] * n * n]
    scales = [weights.scale.double().tolist()[part] for part in parts]
    z = logits([v for stream in token for v in stream], weights, scales)
    pre = [sigmoid(v) + EPS for v in z[:n]]
    comb = sinkhorn([z[2 * n + n * j : 3 * n + n * j] for j in range(n)], iterations, EPS)
    return summed(pre, token, norm), [2 * sigmoid(v) for v in z[n : 2 * n]], comb


class MixConformance(KernelSetup[MixKernel]):
    """Subclass and give the fixture `kernel`. eps is large, so that it shows where it enters."""

    def pre(
        self, kernel: MixKernel, streams: Tensor, weights: MixWeights, norm: Tensor, iterations: int = 20
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return kernel.pre(
            streams.clone(), weights, norm=norm, eps=EPS, hc_eps=EPS, iterations=iterations
        )

    @pytest.mark.parametrize("tokens", [0, 1, 5, 33])
    @pytest.mark.parametrize(("streams", "iterations"), SIZES)
    def test_1_and_2_pre_mixes_the_streams_into_the_sub_blocks_input(
        self, kernel: MixKernel, randn: Randn, tokens: int, streams: int, iterations: int
    ) -> None:
        """1. Logits: fn . streams / rms(streams) * scale + base. 2. comb: row softmax plus eps, a column step, then
        iterations - 1 row and column steps, eps added to every sum."""
        streams_TND, weights = randn(tokens, streams, HIDDEN) * 3, weights_for(randn, streams)
        norm = randn(HIDDEN)
        out = self.pre(kernel, streams_TND, weights, norm, iterations)
        wanted = [
            expected_pre(token, weights, norm.double().tolist(), iterations)
            for token in streams_TND.double().tolist()
        ]
        shapes = [(tokens, HIDDEN), (tokens, streams), (tokens, streams, streams)]
        for i, (given, shape) in enumerate(zip(out, shapes, strict=True)):
            assert given.dtype == torch.float32
            exact = torch.tensor([token[i] for token in wanted], dtype=torch.float64)
            self.close(given, exact.view(shape), scale=20)

    @pytest.mark.parametrize("streams", [1, 3, 4])
    def test_1_post_adds_the_sub_blocks_output_to_the_mixed_streams(
        self, kernel: MixKernel, randn: Randn, streams: int
    ) -> None:
        """1. X'_k = post_k y + sum_j comb[j, k] X_j in fp32, one cast to the streams' dtype."""
        for tokens in (0, 1, 6):
            y_TD, streams_TND = randn(tokens, HIDDEN), randn(tokens, streams, HIDDEN)
            post_TN, comb_TNN = randn(tokens, streams), randn(tokens, streams, streams)
            scaled = post_TN.double().unsqueeze(-1) * y_TD.double().unsqueeze(1)
            exact = scaled + torch.einsum("tjk,tjd->tkd", comb_TNN.double(), streams_TND.double())
            given_TND = streams_TND.clone()
            out = kernel.post(y_TD, given_TND, post_TN, comb_TNN)
            self.close(out, exact.cpu(), scale=10)
            assert torch.equal(given_TND, streams_TND), "the streams were overwritten"

    @pytest.mark.parametrize("streams", [1, 3, 4])
    def test_1_head_sums_the_streams_with_sigmoid_weights(
        self, kernel: MixKernel, randn: Randn, streams: int
    ) -> None:
        """1. The head's logits have one scale; no Sinkhorn, no post."""
        for tokens in (0, 1, 6):
            streams_TND, norm = randn(tokens, streams, HIDDEN), randn(HIDDEN)
            weights = weights_for(randn, streams, head=True)
            scales = weights.scale.double().tolist() * streams
            wanted = []
            for token in streams_TND.double().tolist():
                z = logits([v for stream in token for v in stream], weights, scales)
                wanted.append(summed([sigmoid(v) + EPS for v in z], token, norm.double().tolist()))
            out = kernel.head(streams_TND.clone(), weights, norm=norm, eps=EPS, hc_eps=EPS)
            exact = torch.tensor(wanted, dtype=torch.float64).view(tokens, HIDDEN)
            self.close(out, exact, scale=20)

    def test_1_in_bf16_the_result_is_the_fp32_result_but_for_its_casts(
        self, kernel: MixKernel, randn: Randn
    ) -> None:
        """1. All arithmetic is fp32, whatever the dtype of the streams."""
        streams_TND = randn(5, 4, HIDDEN).bfloat16()
        weights, norm = weights_for(randn, 4), randn(HIDDEN)
        x_TD, post_TN, comb_TNN = self.pre(kernel, streams_TND, weights, norm)
        exact = self.pre(kernel, streams_TND.float(), weights, norm)
        assert (x_TD.dtype, post_TN.dtype, comb_TNN.dtype) == (torch.bfloat16, *[torch.float32] * 2)
        self.close(post_TN, exact[1].cpu(), scale=5)
        self.close(comb_TNN, exact[2].cpu(), scale=5)
        largest = exact[0].abs().max().item()
        self.close(x_TD, exact[0].cpu(), scale=2 * 2.0**-8 * largest / self.tolerance)
        out = kernel.post(x_TD, streams_TND.clone(), post_TN, comb_TNN)
        assert out.dtype == torch.bfloat16
        exact_out = kernel.post(x_TD.float(), streams_TND.float(), post_TN, comb_TNN)
        self.close(
            out, exact_out.cpu(), scale=2.0**-8 * exact_out.abs().max().item() / self.tolerance
        )

    def test_3_a_tokens_result_is_a_function_of_its_own_streams(
        self, kernel: MixKernel, randn: Randn
    ) -> None:
        """3. A token's result is a function of its own streams: it is the same beside tokens of NaN, and alone."""
        streams_TND, weights, norm = randn(40, 4, HIDDEN), weights_for(randn, 4), randn(HIDDEN)
        whole = self.pre(kernel, streams_TND, weights, norm)
        spoiled = streams_TND.clone()
        spoiled[::2] = torch.nan
        beside = self.pre(kernel, spoiled, weights, norm)
        alone = self.pre(kernel, streams_TND[7:8], weights, norm)
        for all_of_it, other, one in zip(whole, beside, alone, strict=True):
            assert torch.equal(other[1::2], all_of_it[1::2])
            self.close(one, all_of_it[7:8].cpu(), scale=5)
