"""Manifold-constrained hyper-connections (spec/architecture.md section 2): streams mixed around each sub-block.

Legend: T tokens, N streams, D hidden. Everything here is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.kernels.base import KernelSet, MixWeights
from dsv4.model.norm import RMSNorm
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


class HyperConnection(OfficialModule):
    """One sub-block's mix. `fn` [(2 + N) N, N D], rows: N pre, N post, N*N comb."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        n = config.hc_mult
        self.config, self.published = config, name
        self.fn = frozen_parameter(torch.zeros((2 + n) * n, n * config.hidden_size))
        self.base = frozen_parameter(torch.zeros((2 + n) * n))
        self.scale = frozen_parameter(torch.ones(3))

    def pre(
        self, streams_TND: Tensor, norm: RMSNorm, kernels: KernelSet
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> normed sub-block input [T, D] in the streams' dtype, post [T, N], comb [T, N, N]."""
        cfg = self.config
        return kernels.mix.pre(
            streams_TND, MixWeights(self.fn, self.base, self.scale), norm=norm.weight, eps=norm.eps, hc_eps=cfg.hc_eps,
            iterations=cfg.hc_sinkhorn_iters,
        )  # fmt: skip

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

    def forward(self, streams_TND: Tensor, norm: RMSNorm, kernels: KernelSet) -> Tensor:
        return kernels.mix.head(
            streams_TND,
            MixWeights(self.fn, self.base, self.scale),
            norm=norm.weight,
            eps=norm.eps,
            hc_eps=self.config.hc_eps,
        )

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        for part in ("fn", "base", "scale"):
            yield f"hc_head_{part}", OfficialTensor(getattr(self, part), "fp32")
