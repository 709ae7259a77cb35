"""One decoder block: attention and MoE, each wrapped by hyper-connections (spec/architecture.md section 1).

Legend: T tokens, N streams, D hidden. The residual path exists only through `HyperConnection.post`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsv4.config import LayerConfig, ModelConfig
from dsv4.kernels.base import KernelSet
from dsv4.metadata.forward import LayerMetadata
from dsv4.model.attention import MQALayer
from dsv4.model.hyper_connection import HyperConnection
from dsv4.model.moe import MoE
from dsv4.model.norm import RMSNorm
from dsv4.model.official import OfficialModule

Probe = Callable[[str, int, Tensor], None]
"""Called with (name, layer, value) at the points that the golden folders store."""


class Block(OfficialModule):
    def __init__(
        self, config: ModelConfig, layer: LayerConfig, index: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.index = index
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config, "hc_attn")
        self.hc_ffn = HyperConnection(config, "hc_ffn")
        self.attn = MQALayer(config, layer, dtype)
        self.ffn = MoE(config, layer, dtype)

    def forward(
        self,
        streams_TND: Tensor,
        token_ids_T: Tensor,
        meta: LayerMetadata,
        kernels: KernelSet,
        probe: Probe | None = None,
    ) -> Tensor:
        x_TD, post, comb = self.hc_attn.pre(streams_TND, self.attn_norm, kernels)
        y_TD = self.attn(x_TD, meta, kernels)
        self._show(probe, attn_in=x_TD, attn_out=y_TD, attn_hc_post=post, attn_hc_comb=comb)
        streams_TND = kernels.mix.post(y_TD, streams_TND, post, comb)
        x_TD, post, comb = self.hc_ffn.pre(streams_TND, self.ffn_norm, kernels)
        y_TD = self.ffn(x_TD, token_ids_T, kernels)
        self._show(probe, ffn_in=x_TD, ffn_out=y_TD, ffn_hc_post=post, ffn_hc_comb=comb)
        return kernels.mix.post(y_TD, streams_TND, post, comb)

    def _show(self, probe: Probe | None, **values: Tensor) -> None:
        if probe is not None:
            for name, value in values.items():
                probe(name, self.index, value)

    def published_children(self) -> Iterator[tuple[str, OfficialModule]]:
        for name in ("attn_norm", "ffn_norm", "attn", "ffn"):
            yield name, getattr(self, name)
        # published as P.hc_attn_fn, without a dot
        yield "", self.hc_attn
        yield "", self.hc_ffn
