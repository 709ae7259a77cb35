"""What every Triton launcher shares: interpreter or GPU, dot dtypes, and the table of compiled configurations."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.backends.compiler import GPUTarget

KIB = 1024


@frozen
class Target:
    """A GPU that kernels are compiled for ahead of time, and the shared memory one program may take there."""

    backend: str
    arch: int | str
    warp_lanes: int
    shared_limit: int

    @property
    def gpu(self) -> Any:
        """As the compiler takes it."""
        return GPUTarget(self.backend, self.arch, self.warp_lanes)


TARGETS: Mapping[str, Target] = {
    "sm_90": Target("cuda", 90, 32, 227 * KIB),
    "sm_100": Target("cuda", 100, 32, 227 * KIB),
    "gfx942": Target("hip", "gfx942", 64, 64 * KIB),
    "gfx950": Target("hip", "gfx950", 64, 160 * KIB),
}


@frozen
class Tiling:
    """Tile shape of a GEMM, and how many warps and load stages run it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@frozen(kw_only=True)
class KernelVariant:
    """One configuration that a launcher can choose: what ahead-of-time compilation needs to know of it."""

    name: str
    fn: Any
    """The @triton.jit kernel."""
    signature: Mapping[str, str]
    """Runtime arguments: `*fp32 *bf16 *u8 *i32 *i64 i32 i64 fp32`."""
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    """Arguments that are multiples of 16 (addresses: of 16 bytes)."""
    targets: tuple[str, ...] = tuple(TARGETS)
    """Names of TARGETS on which the launcher chooses this configuration."""


@frozen(kw_only=True)
class CompiledVariant:
    """Resources of a compiled kernel; spills in bytes a thread (CUDA: its whole stack frame)."""

    shared: int
    registers: int
    spilled: int


def interpreting() -> bool:
    """Whether kernels run on the CPU, through the interpreter (chosen when triton is imported)."""
    return bool(triton.knobs.runtime.interpret)


def next_pow2(width: int) -> int:
    """The smallest power of two that is at least `width` (at least 1)."""
    return 1 << max(width - 1, 0).bit_length()


def dot_dtype(tensor: Tensor) -> Any:
    """Operand dtype of a dot over `tensor`: the interpreter multiplies bf16 wrongly, so there it is fp32."""
    wide = interpreting() or tensor.dtype == torch.float32
    return tl.float32 if wide else tl.bfloat16


def supports_native_fp8(device: torch.device) -> bool:
    """Whether e4m3 casts and dots exist in hardware: NVIDIA from compute capability 8.9 on."""
    if interpreting() or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start while the one in front of it runs: NVIDIA from Hopper on."""
    if interpreting() or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def compile_variant(variant: KernelVariant, target: Target) -> CompiledVariant:
    """Compile for a target, which needs no GPU. The process must not have chosen the interpreter."""
    names = variant.fn.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in variant.constexprs.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = triton.compiler.ASTSource(variant.fn, signature, constexprs, aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=target.gpu, options=options)
    registers, spilled = (
        _cuda_resources(compiled.asm["cubin"])
        if target.backend == "cuda"
        else _hip_resources(compiled.asm["amdgcn"])
    )
    return CompiledVariant(
        shared=int(compiled.metadata.shared), registers=registers, spilled=spilled
    )


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    # A kernel without arrays of its own has a stack for spilled registers only.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return max(int(reg) for reg, _ in found), max(int(stack) for _, stack in found)


def _cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _hip_resources(assembly: str) -> tuple[int, int]:
    def largest(key: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{key}:\s+(\d+)", assembly)), default=0)

    return largest("vgpr_count"), 4 * largest("vgpr_spill_count")
