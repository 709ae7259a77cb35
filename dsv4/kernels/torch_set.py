"""The reference kernel set: plain torch, any device, any shape."""

from __future__ import annotations

from typing import ClassVar

import torch

from dsv4.config import ModelConfig, PoolConfig
from dsv4.kernels.attend_ref import TorchAttention
from dsv4.kernels.base import KernelFamily, KernelSet
from dsv4.kernels.compress_ref import TorchCompress
from dsv4.kernels.experts_ref import TorchExperts
from dsv4.kernels.linear_ref import TiledLinear, TorchLinear
from dsv4.kernels.mix_ref import TorchMix
from dsv4.kernels.norm_ref import TorchNorm
from dsv4.kernels.score_ref import TorchScore
from dsv4.kernels.select_ref import TorchSelect
from dsv4.kernels.store_ref import TorchStore
from dsv4.metadata.fill import TorchFill


class TorchKernels(KernelFamily):
    name: ClassVar[str] = "torch"

    @classmethod
    def why_not(
        cls, device: torch.device, model: ModelConfig, pool_config: PoolConfig
    ) -> str | None:
        return None

    @classmethod
    def build(cls, *, deterministic: bool) -> KernelSet:
        linear = TiledLinear() if deterministic else TorchLinear()
        return KernelSet(
            name=cls.name,
            fill=TorchFill,
            store=TorchStore(),
            compress=TorchCompress(),
            score=TorchScore(deterministic=deterministic),
            select=TorchSelect(),
            attend=TorchAttention(deterministic=deterministic),
            linear=linear,
            norm=TorchNorm(),
            mix=TorchMix(linear, deterministic=deterministic),
            experts=TorchExperts(linear),
        )
