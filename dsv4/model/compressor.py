"""Compressor of a CSA or HCA layer, main or indexer (spec/architecture.md 3.5). Projects nothing itself: its layer
hands it the fused projection `kv | gate`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.kernels.base import KernelSet, Rounding
from dsv4.metadata.forward import LayerMetadata
from dsv4.metadata.plans import CompressorTarget, FoldPlan
from dsv4.model.norm import RMSNorm
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


class Compressor(OfficialModule):
    """Pools the tokens of a closing window into one entry of `dim` channels."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dim: int) -> None:
        super().__init__()
        # CSA overlaps: an A half for the previous window, a B half for the own one
        self.channels = 2 * dim if layer.kind is LayerKind.CSA else dim
        self.ape_MC = frozen_parameter(torch.zeros(layer.ratio, self.channels))
        self.norm = RMSNorm(dim, config.rms_norm_eps)

    @property
    def width(self) -> int:
        """Columns of the fused projection: kv and gate."""
        return 2 * self.channels

    def forward(
        self,
        projected_TC: Tensor,
        meta: LayerMetadata,
        target: CompressorTarget,
        rounding: Rounding,
        kernels: KernelSet,
    ) -> None:
        """Close this forward's windows into `target`, then remember what open windows still need."""
        plan = meta.state_plan
        assert plan is not None
        if isinstance(plan, FoldPlan):
            kernels.compress.fold(
                projected_TC, ape_MC=self.ape_MC, norm=self.norm.weight, eps=self.norm.eps,
                plan=plan, target=target, rounding=rounding,
            )  # fmt: skip
        else:
            kernels.compress.overlap(
                projected_TC, ape_MC=self.ape_MC, norm=self.norm.weight, eps=self.norm.eps,
                plan=plan, target=target, rounding=rounding,
            )  # fmt: skip

    def slices(self, prefix: str, weight: Tensor) -> Iterator[tuple[str, OfficialTensor]]:
        """Published tensors: the two halves of the fused projection rows, and the position bias."""
        yield f"{prefix}wkv.weight", OfficialTensor(weight[: self.channels], "bf16")
        yield f"{prefix}wgate.weight", OfficialTensor(weight[self.channels : self.width], "bf16")

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        yield "ape", OfficialTensor(self.ape_MC, "fp32")
