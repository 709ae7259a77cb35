"""Lightning indexer of a CSA layer (spec/architecture.md 3.7): its own keys, scores, and the top-k selection.

Legend: T tokens, H index heads, C index head dim, N entries.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dsv4.config import LayerConfig, ModelConfig
from dsv4.kernels.base import KernelSet, Rounding
from dsv4.metadata.forward import LayerMetadata
from dsv4.model.compressor import Compressor
from dsv4.model.official import OfficialModule, OfficialTensor


class Indexer(OfficialModule):
    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.rounding = Rounding.HADAMARD_FP4 if config.kv_quant == "official" else Rounding.NONE
        self.compressor = Compressor(config, layer, config.index_head_dim)

    @property
    def width(self) -> int:
        """Columns of the fused projection: the key compressor's, then one weight a head."""
        return self.compressor.width + self.heads

    def forward(
        self, projected: Tensor, queries: Tensor, meta: LayerMetadata, kernels: KernelSet
    ) -> None:
        """projected [T, width] fp32, queries [T, H * C]: store the keys, write the selected rows into the stream."""
        inputs, output = meta.score_inputs, meta.select_output
        assert meta.index is not None
        assert inputs is not None
        assert output is not None
        keys, weights_TH = (
            projected[:, : self.compressor.width],
            projected[:, self.compressor.width :],
        )
        self.compressor(keys, meta, meta.index, self.rounding, kernels)
        q_THC, weights_TH = kernels.score.queries(
            queries.unflatten(-1, (self.heads, self.dim)), weights_TH, rope=meta.rope,
            rounding=self.rounding, scale=self.dim**-0.5 * self.heads**-0.5, view=inputs.view,
        )  # fmt: skip
        for first in range(0, q_THC.shape[0], inputs.tile_tokens):
            tile = slice(first, first + inputs.tile_tokens)
            scores_tN = meta.workspace.score_tile(q_THC[tile].shape[0], inputs.max_entries)
            kernels.score.score(
                q_THC[tile], weights_TH[tile], inputs, first_token=first, out_TN=scores_tN
            )
            kernels.select.select(scores_tN, inputs, output, first_token=first)

    def slices(self, weight: Tensor) -> Iterator[tuple[str, OfficialTensor]]:
        yield from self.compressor.slices("indexer.compressor.", weight)
        yield (
            "indexer.weights_proj.weight",
            OfficialTensor(weight[self.compressor.width : self.width], "bf16"),
        )
