"""Multi-token-prediction block (spec/architecture.md section 5): one extra block over the main residual streams.

Legend: T tokens, N streams, D hidden. Row t pairs the streams of position t with the embedding of token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import LayerConfig, ModelConfig
from dsv4.kernels.base import KernelSet
from dsv4.metadata.forward import LayerMetadata
from dsv4.model.block import Block, Probe
from dsv4.model.hyper_connection import HyperHead
from dsv4.model.norm import RMSNorm
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


class MTPBlock(Block):
    """Embedding and output head are the main model's; norm and hc_head are its own."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype
    ) -> None:
        super().__init__(config, layer, index, dtype)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = frozen_parameter(torch.zeros(hidden, hidden, dtype=dtype))
        self.h_proj = frozen_parameter(torch.zeros(hidden, hidden, dtype=dtype))
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.norm, self.hc_head = RMSNorm(hidden, eps), HyperHead(config)

    def draft(
        self,
        streams_TND: Tensor,
        next_embedding_TD: Tensor,
        next_ids_T: Tensor,
        meta: LayerMetadata,
        kernels: KernelSet,
        probe: Probe | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> (normed hidden [T, D] for the shared head, the block's own output streams [T, N, D])."""
        linear = kernels.linear.linear
        u_TD = linear(self.enorm(next_embedding_TD, kernels), self.e_proj)
        mixed = linear(self.hnorm(streams_TND, kernels).flatten(0, 1), self.h_proj).view_as(
            streams_TND
        )
        block_in = u_TD.unsqueeze(1) + mixed
        out = self(block_in, next_ids_T, meta, kernels)
        if probe is not None:
            probe("mtp.block_in", self.index, block_in)
            probe("mtp.block_out", self.index, out)
        return self.hc_head(out, self.norm, kernels), out

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        yield "e_proj.weight", OfficialTensor(self.e_proj, "fp8")
        yield "h_proj.weight", OfficialTensor(self.h_proj, "fp8")

    def published_children(self) -> Iterator[tuple[str, OfficialModule]]:
        yield from super().published_children()
        for name in ("enorm", "hnorm", "norm"):
            yield name, getattr(self, name)
        yield "", self.hc_head
