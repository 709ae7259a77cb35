"""RMSNorm of rows of any width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.base import NormKernel
from dsv4.kernels.tile_triton import cast, to_fp32
from dsv4.triton_launch import KernelVariant, next_pow2


@triton.jit
def rms_scale(x, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of rows of an fp32 tile [N, D] -> [N, 1]; lanes behind WIDTH must be 0."""
    mean = tl.sum(x * x, 1) * (1.0 / WIDTH)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


class TritonNorm(NormKernel):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width = x.shape[-1]
        num_rows = out.numel() // max(width, 1)
        if num_rows == 0:
            return out
        x_RD = x.reshape(num_rows, width)
        if x_RD.stride(1) != 1:
            x_RD = x_RD.contiguous()
        _norm_kernel[(num_rows,)](
            x_RD,
            x_RD.stride(0),
            weight,
            eps,
            out,
            WIDTH=width,
            **_config(width),
        )
        return out


def _config(width: int) -> dict[str, int]:
    """One program a row: two 16-byte loads of bf16 a thread keep the loads wide and all warps busy."""
    lanes = next_pow2(width)
    return {"D": lanes, "num_warps": min(max(lanes // 512, 1), 16)}


@triton.jit(do_not_specialize=["eps"])
def _norm_kernel(x_ptr, x_stride, weight_ptr, eps, out_ptr, WIDTH: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, D)[None, :]
    there = lane < WIDTH
    x = to_fp32(tl.load(x_ptr + row * x_stride + lane, mask=there, other=0.0))
    weight = tl.load(weight_ptr + lane, mask=there, other=0.0)
    y = x * rms_scale(x, eps, WIDTH) * weight
    tl.store(out_ptr + row * WIDTH + lane, cast(y, out_ptr.dtype.element_ty), mask=there)


def variants() -> tuple[KernelVariant, ...]:
    """The widest row, Pro's hidden size, in bf16."""
    config = _config(7168)
    return (
        KernelVariant(
            name="norm 7168",
            fn=_norm_kernel,
            signature={
                "x_ptr": "*bf16",
                "x_stride": "i32",
                "weight_ptr": "*fp32",
                "eps": "fp32",
                "out_ptr": "*bf16",
            },
            constexprs={"WIDTH": 7168, "D": config["D"]},
            num_warps=config["num_warps"],
            aligned=("x_ptr", "x_stride", "weight_ptr", "out_ptr"),
        ),
    )
