"""The end of attention over split rows: partial sums of a token and head become one result.

Legend: T tokens, H heads, D head dim, P half the rope width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.attend_tiles_triton import finish, rope_back
from dsv4.kernels.tile_triton import cast
from dsv4.metadata.plans import RopeTable
from dsv4.triton_launch import KernelVariant, next_pow2

TILE_VALUES = 16_384
"""fp32 values that a program of 4 warps sums: 128 registers a thread. More programs would each wait as long."""


@triton.jit(do_not_specialize=["num_parts", "part_rows"])
def _combine_kernel(
    part_ptr, num_parts, part_rows, sink_ptr, out_ptr, out_token, out_head, lse_ptr, lse_token, lse_head,
    cos_ptr, sin_ptr, rope_token,
    HEADS: tl.constexpr, ROW_DIM: tl.constexpr, ROPE: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """D lanes of one token and head. Part s of row r: ROW_DIM sums at `r * num_parts + s`; behind all of those, the
    part's maximum (log 2) and mass. A part without rows has the maximum -inf, and its sums may hold anything."""
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    head = row % HEADS
    # A weight, and no part: loaded while those are still being summed.
    sink = tl.load(sink_ptr + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first_lane = tl.program_id(1) * D
    part = tl.arange(0, S)
    place = row * num_parts + part
    sums = part_ptr + part_rows.to(tl.int64) * ROW_DIM + place * 2
    top_S = tl.load(sums, mask=part < num_parts, other=-float("inf"))
    mass_S = tl.load(sums + 1, mask=part < num_parts, other=0.0)
    top = tl.max(top_S, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    factor = tl.exp2(top_S - shift)
    lane = first_lane + tl.arange(0, D)[None, :]
    # not "> -inf": a NaN goes on
    filled = (top_S != -float("inf"))[:, None]
    partial = tl.load(
        part_ptr + place[:, None] * ROW_DIM + lane, mask=filled & (lane < ROW_DIM), other=0.0
    )
    acc = tl.sum(partial * factor[:, None], 0)[None, :]
    one = tl.zeros([1], tl.float32)
    result, lse = finish(acc, one + top, one + tl.sum(mass_S * factor, 0), one + sink)
    if ROPE:
        start = token * rope_token
        result = rope_back(
            result, cos_ptr + start, sin_ptr + start, first_lane, ROW_DIM - ROPE, ROPE, 1, D
        )
    out_place = out_ptr + token * out_token + head * out_head + lane
    tl.store(out_place, cast(result, out_ptr.dtype.element_ty), mask=lane < ROW_DIM)
    if LSE and first_lane == 0:
        tl.store(lse_ptr + token * lse_token + head * lse_head + tl.arange(0, 1), lse)


def combine_parts(
    parts: Tensor,
    num_parts: int,
    sink_H: Tensor,
    *,
    out_THD: Tensor,
    lse_TH: Tensor | None,
    rope: RopeTable | None,
    after_launch: bool,
) -> None:
    """Parts as the attend kernel leaves them. `after_launch`: that kernel allows this one to start while it runs."""
    num_tokens, num_heads, dim = out_THD.shape
    width, lanes = next_pow2(num_parts), next_pow2(dim)
    lanes = min(lanes, max(TILE_VALUES // width, 64))
    launch = {"launch_pdl": True} if after_launch else {}
    _combine_kernel[(num_tokens * num_heads, -(-dim // lanes))](
        parts, num_parts, num_tokens * num_heads * num_parts, sink_H,
        out_THD, *strides(out_THD), *lse_args(lse_TH), *rope_args(rope),
        HEADS=num_heads, ROW_DIM=dim, ROPE=rope_width(rope), LSE=lse_TH is not None, PDL=after_launch,
        S=width, D=lanes, num_warps=4, **launch,
    )  # fmt: skip


def strides(x_THD: Tensor) -> tuple[int, int]:
    """Of tokens and heads. A lone token's or head's stride has no meaning; it must not choose another compilation."""
    num_tokens, num_heads, dim = x_THD.shape
    head = x_THD.stride(1) if num_heads > 1 else dim
    return (x_THD.stride(0) if num_tokens > 1 else num_heads * head), head


def lse_args(lse_TH: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Pointer and strides, as both kernels take them."""
    return (None, 0, 0) if lse_TH is None else (lse_TH, lse_TH.stride(0), lse_TH.stride(1))


def rope_args(rope: RopeTable | None) -> tuple[Tensor | None, Tensor | None, int]:
    """cos, sin and the stride of their rows, as both kernels take them."""
    if rope is None:
        return None, None, 0
    num_tokens, width = rope.cos_TP.shape
    return rope.cos_TP, rope.sin_TP, rope.cos_TP.stride(0) if num_tokens > 1 else width


def rope_width(rope: RopeTable | None) -> int:
    """Channels that are rotated back."""
    return 0 if rope is None else 2 * rope.cos_TP.shape[-1]


def combine_variants() -> tuple[KernelVariant, ...]:
    """Parts of one Flash token in narrow tiles, as NVIDIA and AMD run it."""
    signature = {
        "part_ptr": "*fp32", "num_parts": "i32", "part_rows": "i32", "sink_ptr": "*fp32", "out_ptr": "*bf16",
        "out_token": "i32", "out_head": "i32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "rope_token": "i32",
    }  # fmt: skip
    published = {
        "lse_ptr": None,
        "lse_token": 0,
        "lse_head": 0,
        "ROW_DIM": 512,
        "ROPE": 64,
        "LSE": False,
    }
    cuda, hip = ("sm_90", "sm_100"), ("gfx942", "gfx950")
    return tuple(
        KernelVariant(
            name=name, fn=_combine_kernel, signature=signature,
            constexprs=published | {"HEADS": 64, "PDL": targets == cuda, "S": 32, "D": 512},
            aligned=tuple(name for name in signature if name not in ("num_parts", "part_rows")),
            targets=targets,
        )
        for name, targets in (("combine", cuda), ("combine-hip", hip))
    )  # fmt: skip
