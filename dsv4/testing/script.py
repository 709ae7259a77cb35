"""Rows that follow from token ids and positions alone: what a pool must give back, known without asking it.

Legend: N tokens, D row values, C channels of a projection `kv | gate` (CSA: each with an A and a B half).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.testing import reference

MAX_POSITION = 512
EPS = 1e-6


@frozen(kw_only=True, eq=False)
class ScriptedCompressor:
    """One compressor of one layer: fixed random projections per token id, plus a share of the position."""

    layer: LayerConfig
    dim: int
    rope_dim: int
    id_VC: Tensor
    position_PC: Tensor
    ape_MC: Tensor
    norm: Tensor
    _known: dict[tuple[int, tuple[int, ...]], list[float]] = field(factory=dict, init=False)

    def projected(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """fp32 [N, C], as the layer's GEMM would hand it over."""
        return self.id_VC[list(ids)] + self.position_PC[list(positions)]

    def entry(self, tokens: Sequence[int], index: int) -> list[float]:
        """Entry `index` of a sequence, before rounding and storing: pooled, normed, rotated at ratio * index."""
        ratio = self.layer.ratio
        first = ratio * (index - 1) if self.layer.kind is LayerKind.CSA else ratio * index
        first = max(0, first)
        key = (index, tuple(tokens[first : ratio * (index + 1)]))
        if key not in self._known:
            self._known[key] = self._entry(key[1], first, index)
        return self._known[key]

    def _entry(self, own: Sequence[int], first: int, index: int) -> list[float]:
        ratio, dim = self.layer.ratio, self.dim
        positions = range(first, first + len(own))
        rows = self.projected(own, positions).double().tolist()
        bias = self.ape_MC.double().tolist()
        half = len(rows[0]) // 2
        gates, values = [], []
        for position, row in zip(positions, rows, strict=True):
            gate = [g + b for g, b in zip(row[half:], bias[position % ratio], strict=True)]
            # CSA: a token of the window before shows its A half, one of the own window its B half
            shift = dim if half == 2 * dim and position >= ratio * index else 0
            values.append(row[shift : shift + dim])
            gates.append(gate[shift : shift + dim])
        pooled = reference.rms_normed(
            reference.pooled(gates, values), EPS, self.norm.double().tolist()
        )
        turns = reference.frequencies(self.layer.rope_theta, self.rope_dim, self.layer.yarn)
        return reference.rotated(pooled, [ratio * index * f for f in turns])


@frozen(kw_only=True, eq=False)
class ScriptedLayer:
    """Window rows and compressors of one layer."""

    window_VD: Tensor
    position_PD: Tensor
    main: ScriptedCompressor | None
    index: ScriptedCompressor | None

    def window(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """fp32 [N, D]: KV of tokens, as it is before the row format rounds it."""
        return self.window_VD[list(ids)] + self.position_PD[list(positions)]


class Script:
    """All layers of a model."""

    def __init__(self, model: ModelConfig, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def compressor(layer: LayerConfig, dim: int) -> ScriptedCompressor:
            width = 2 * dim * (2 if layer.kind is LayerKind.CSA else 1)
            return ScriptedCompressor(
                layer=layer,
                dim=dim,
                rope_dim=model.qk_rope_head_dim,
                id_VC=random(model.vocab_size, width),
                position_PC=random(MAX_POSITION, width) / 4,
                ape_MC=random(layer.ratio, width // 2),
                norm=random(dim).abs() + 0.5,
            )

        self.model = model
        self.layers = [
            ScriptedLayer(
                window_VD=random(model.vocab_size, model.head_dim),
                position_PD=random(MAX_POSITION, model.head_dim) / 4,
                main=compressor(layer, model.head_dim) if layer.ratio else None,
                index=compressor(layer, model.index_head_dim)
                if layer.kind is LayerKind.CSA
                else None,
            )
            for layer in model.layers
        ]

    def streams(self, token: int, position: int) -> Tensor:
        """The residual streams that a slot's last token leaves behind."""
        generator = torch.Generator().manual_seed(1 + token + 1000 * position)
        return torch.randn(self.model.hc_mult * self.model.hidden_size, generator=generator)
