"""The Triton kernel set: NVIDIA and AMD GPUs, and any device through Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

import torch

from dsv4.config import ModelConfig, PoolConfig
from dsv4.kernels.base import KernelFamily, KernelSet, LinearKernel
from dsv4.kernels.linear_ref import TorchLinear

MIN_CAPABILITY = (8, 0)
"""bf16 products."""
WIDTH_STEP = 16
"""Channels that one matrix instruction takes."""


class TritonKernels(KernelFamily):
    """Imports triton only when it is built, so that the library works where there is none."""

    name: ClassVar[str] = "triton"

    @classmethod
    def why_not(
        cls, device: torch.device, model: ModelConfig, pool_config: PoolConfig
    ) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type == "cuda":
            return _why_not_cuda(device)
        if _interpreting():
            return None
        return (
            f"device {device.type}: needs a GPU, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment from the start)"
        )

    @classmethod
    def why_not_op(
        cls, op: str, device: torch.device, model: ModelConfig, pool_config: PoolConfig
    ) -> str | None:
        name = {"attend": "head_dim", "score": "index_head_dim"}.get(op)
        if name is not None and getattr(model, name) % WIDTH_STEP:
            return f"{name} {getattr(model, name)} is no multiple of {WIDTH_STEP}"
        return cls.why_not(device, model, pool_config)

    @classmethod
    def only_by_name(cls, device: torch.device) -> str | None:
        return "the interpreter is for tests" if _interpreting() else None

    @classmethod
    def build(cls, *, deterministic: bool) -> KernelSet:
        from dsv4.kernels.attend_triton import TritonAttention
        from dsv4.kernels.compress_triton import TritonCompress
        from dsv4.kernels.experts_triton import TritonExperts
        from dsv4.kernels.linear_triton import TritonLinear
        from dsv4.kernels.mix_triton import TritonMix
        from dsv4.kernels.norm_triton import TritonNorm
        from dsv4.kernels.score_triton import TritonScore
        from dsv4.kernels.select_triton import TritonSelect
        from dsv4.kernels.store_triton import TritonStore
        from dsv4.metadata.fill_triton import TritonFill

        # torch's GEMMs are the fastest, but a row's bits depend on how many rows there are
        linear: LinearKernel = TritonLinear() if deterministic else TorchLinear()
        return KernelSet(
            name=cls.name,
            fill=TritonFill,
            store=TritonStore(),
            compress=TritonCompress(),
            score=TritonScore(deterministic=deterministic),
            select=TritonSelect(),
            attend=TritonAttention(deterministic=deterministic),
            linear=linear,
            norm=TritonNorm(),
            mix=TritonMix(),
            experts=TritonExperts(linear, deterministic=deterministic),
        )


def _interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter; decided by TRITON_INTERPRET when they are imported."""
    from dsv4.triton_launch import interpreting

    return importlib.util.find_spec("triton") is not None and interpreting()


def _why_not_cuda(device: torch.device) -> str | None:
    if torch.version.hip:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return None
    have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
    return f"{torch.cuda.get_device_name(device)} has compute capability {have}, needed is {need}"
