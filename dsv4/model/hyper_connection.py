"""Manifold-constrained hyper-connections (spec/architecture.md section 2): streams mixed around each sub-block.

Legend: T tokens, N streams, D hidden. Everything here is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.kernels.base import KernelSet
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): torch.sigmoid rounds differently in the tail of its vector loop, so its result for a token
    would depend on how many tokens stand before it."""
    return torch.exp(-x).add_(1).reciprocal_()


def stream_statistics(
    streams_TND: Tensor, fn: Tensor, eps: float, kernels: KernelSet
) -> tuple[Tensor, Tensor]:
    """(streams in fp32 [T, N, D], z [T, rows of fn]): the mix logits before scale and base."""
    streams32_TND = streams_TND.float()
    flat = streams32_TND.flatten(1)
    scale = flat.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return streams32_TND, kernels.linear.linear(flat, fn) * scale


def weighted_sum(weights_TN: Tensor, streams_TND: Tensor) -> Tensor:
    return torch.bmm(weights_TN.unsqueeze(1), streams_TND).squeeze(1)


class HyperConnection(OfficialModule):
    """One sub-block's mix. `fn` [(2 + N) N, N D], rows: N pre, N post, N*N comb."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        n = config.hc_mult
        self.config, self.published = config, name
        self.fn = frozen_parameter(torch.zeros((2 + n) * n, n * config.hidden_size))
        self.base = frozen_parameter(torch.zeros((2 + n) * n))
        self.scale = frozen_parameter(torch.ones(3))
        # which of the three scales each row of fn takes
        part = torch.tensor([0] * n + [1] * n + [2] * n * n)
        self.register_buffer("part", part, persistent=False)
        self.part: Tensor

    def pre(self, streams_TND: Tensor, kernels: KernelSet) -> tuple[Tensor, Tensor, Tensor]:
        """-> sub-block input [T, D] in the streams' dtype, post [T, N], comb [T, N, N]."""
        cfg, n = self.config, self.config.hc_mult
        streams32, z = stream_statistics(streams_TND, self.fn, cfg.rms_norm_eps, kernels)
        mix = torch.addcmul(self.base, z, self.scale.index_select(0, self.part))
        gates = sigmoid(mix[:, : 2 * n])
        pre_TN, post_TN = gates[:, :n] + cfg.hc_eps, 2 * gates[:, n:]
        logits = mix[:, 2 * n :].reshape(-1, n, n)
        comb = kernels.mix.sinkhorn(logits, iterations=cfg.hc_sinkhorn_iters, eps=cfg.hc_eps)
        return weighted_sum(pre_TN, streams32).to(streams_TND.dtype), post_TN, comb

    @staticmethod
    def post(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
        """X'_k = post_k y + sum_j comb[j, k] X_j, one cast at the end."""
        scaled = post_TN.unsqueeze(-1) * y_TD.float().unsqueeze(1)
        mixed = torch.baddbmm(scaled, comb_TNN.transpose(1, 2), streams_TND.float())
        return mixed.to(streams_TND.dtype)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        for part in ("fn", "base", "scale"):
            yield f"{self.published}_{part}", OfficialTensor(getattr(self, part), "fp32")


class HyperHead(OfficialModule):
    """Streams -> one vector per token, by N sigmoid weights; no Sinkhorn, no post."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n = config.hc_mult
        self.config = config
        self.fn = frozen_parameter(torch.zeros(n, n * config.hidden_size))
        self.base = frozen_parameter(torch.zeros(n))
        self.scale = frozen_parameter(torch.ones(1))

    def forward(self, streams_TND: Tensor, kernels: KernelSet) -> Tensor:
        cfg = self.config
        streams32, z = stream_statistics(streams_TND, self.fn, cfg.rms_norm_eps, kernels)
        weights_TN = sigmoid(z * self.scale + self.base) + cfg.hc_eps
        return weighted_sum(weights_TN, streams32).to(streams_TND.dtype)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        for part in ("fn", "base", "scale"):
            yield f"hc_head_{part}", OfficialTensor(getattr(self, part), "fp32")
