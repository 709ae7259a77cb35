"""The decoder: embedding, blocks, head, and the MTP block (spec/architecture.md section 1).

Legend: T tokens, R rows of logits asked for, N streams, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsv4.config import ModelConfig
from dsv4.kernels.base import KernelSet
from dsv4.metadata.forward import Epoch, ForwardMetadata
from dsv4.model.block import Block, Probe
from dsv4.model.hyper_connection import HyperHead
from dsv4.model.mtp import MTPBlock
from dsv4.model.norm import RMSNorm
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


class Decoder(OfficialModule):
    """All parameters of a model. `dtype` is the activations' and the large weights'; norms, position biases, sinks,
    hyper-connections, router, compressors and head stay fp32 (spec/architecture.md section 6)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed = frozen_parameter(torch.zeros(vocab, hidden, dtype=dtype))
        self.layers = nn.ModuleList(
            Block(config, layer, i, dtype) for i, layer in enumerate(config.main_layers)
        )
        self.norm, self.hc_head = RMSNorm(hidden, config.rms_norm_eps), HyperHead(config)
        self.head = frozen_parameter(torch.zeros(vocab, hidden))
        self.mtp = nn.ModuleList(
            MTPBlock(config, layer, config.num_hidden_layers + i, dtype)
            for i, layer in enumerate(config.draft_layers)
        )

    def forward(
        self,
        metadata: ForwardMetadata,
        epoch: Epoch,
        kernels: KernelSet,
        probe: Probe | None = None,
    ) -> Tensor:
        """The residual streams [T, N, D] after the last layer, of the tokens that `metadata` was filled for."""
        ids_T = metadata.token_ids_T
        embedded_TD = functional.embedding(ids_T, self.embed)
        streams_TND = embedded_TD.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        for i, layer in enumerate(self.layers):
            if probe is not None:
                probe("streams", i, streams_TND)
            streams_TND = layer(streams_TND, ids_T, metadata.for_layer(i, epoch), kernels, probe)
        if probe is not None:
            probe("streams", len(self.layers), streams_TND)
        return streams_TND

    def logits(self, streams_RND: Tensor, kernels: KernelSet, probe: Probe | None = None) -> Tensor:
        """fp32 logits [R, V] of chosen rows of the final streams."""
        hidden_RD = self.hc_head(streams_RND, self.norm, kernels)
        if probe is not None:
            probe("final_norm", 0, hidden_RD)
        return kernels.linear.linear(hidden_RD.float(), self.head)

    def draft_logits(
        self,
        streams_TND: Tensor,
        next_ids_T: Tensor,
        metadata: ForwardMetadata,
        epoch: Epoch,
        kernels: KernelSet,
        *,
        draft: int = 0,
        probe: Probe | None = None,
    ) -> Tensor:
        """fp32 logits [T, V] of draft block `draft`: row t predicts token t + 2 from streams t and token t + 1."""
        block = self.mtp[draft]
        assert isinstance(block, MTPBlock)
        meta = metadata.for_layer(self.config.num_hidden_layers + draft, epoch)
        embedded_TD = functional.embedding(next_ids_T, self.embed)
        hidden_TD, _ = block.draft(streams_TND, embedded_TD, next_ids_T, meta, kernels, probe)
        return kernels.linear.linear(hidden_TD.float(), self.head)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        yield "embed.weight", OfficialTensor(self.embed, "bf16")
        yield "head.weight", OfficialTensor(self.head, "bf16")

    def published_children(self) -> Iterator[tuple[str, OfficialModule]]:
        yield "norm", self.norm
        yield "", self.hc_head
        for prefix, blocks in (("layers", self.layers), ("mtp", self.mtp)):
            for i, block in enumerate(blocks):
                assert isinstance(block, OfficialModule)
                yield f"{prefix}.{i}", block
