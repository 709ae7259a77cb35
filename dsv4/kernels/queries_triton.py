"""Indexer queries in one launch, in place: RoPE, official rounding, e4m3 codes where the keys are fp8.

Legend: T tokens, H index heads, D index dim, P half the rope width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.base import Rounding
from dsv4.kernels.rows_triton import (
    BF16,
    FP32,
    HADAMARD_FP4_ROUNDING,
    rounded,
    rounding_code,
)
from dsv4.kernels.tile_triton import (
    cast,
    encode_e4m3,
    fp8_scale,
    load_rope,
    rotate,
    round_bf16,
    scaled_fp8,
    to_fp32,
)
from dsv4.metadata.plans import RopeTable
from dsv4.triton_launch import KernelVariant, next_pow2

TILE_HEADS = 16
"""Heads of a program: 16 x 128 channels keep 128 threads at 16 fp32 values each."""


@triton.jit
def _queries_kernel(
    q_ptr, code_ptr, weights_ptr, cos_ptr, sin_ptr, scale, q_token, q_head, weights_token, num_heads,
    DIM: tl.constexpr, ROPE: tl.constexpr, ROUNDING: tl.constexpr, KIND: tl.constexpr,
    CODES: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """N heads of a token. q_ptr and code_ptr are the same memory; KIND is q's own dtype."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * N + tl.arange(0, N)
    lane = tl.arange(0, D)[None, :]
    ok = head < num_heads
    keep = ok[:, None] & (lane < DIM)
    place = token * q_token + head.to(tl.int64) * q_head
    x = to_fp32(tl.load(q_ptr + place[:, None] + lane, mask=keep, other=0.0))
    weight_place = weights_ptr + token * weights_token + head[:, None]
    weight = tl.load(weight_place, mask=ok[:, None], other=0.0) * scale
    row = tl.full([1], 0, tl.int64) + token
    cos, sin, turned = load_rope(cos_ptr, sin_ptr, row, row >= 0, DIM - ROPE, ROPE, D)
    x = rotate(x, cos, sin, turned, N, D, (DIM - ROPE) % 2)
    x = rounded(x, ROUNDING, KIND, DIM, DIM, N, D)
    # Threads that hold copies of one value must all have read it before one of them writes.
    tl.debug_barrier()
    if CODES:
        # Through memory: the compiler would compute all above twice, for the codes and in the layout of the scales.
        tl.store(
            q_ptr + place[:, None] + lane, cast(round_bf16(x), q_ptr.dtype.element_ty), mask=keep
        )
        tl.debug_barrier()
        x = to_fp32(tl.load(q_ptr + place[:, None] + lane, mask=keep, other=0.0))
        tl.debug_barrier()
        scales = fp8_scale(x, lane < DIM, N, D, D)
        code = encode_e4m3(scaled_fp8(x, scales, N, D, D))
        item: tl.constexpr = 4 if KIND == FP32 else 2
        tl.store(code_ptr + place[:, None] * item + lane, code.to(tl.uint8), mask=keep)
        weight *= scales
    else:
        tl.store(q_ptr + place[:, None] + lane, cast(x, q_ptr.dtype.element_ty), mask=keep)
    tl.store(weight_place, weight, mask=ok[:, None])


def prepare_queries(
    q_THD: Tensor,
    weights_TH: Tensor,
    *,
    rope: RopeTable,
    rounding: Rounding,
    scale: float,
    codes: bool,
) -> tuple[Tensor, Tensor]:
    """Overwrites both inputs and returns them; with `codes`, the queries are a float8_e4m3fn view [T, H, D] of the
    first D bytes of each head's memory, and their power-of-two scales are in the weights."""
    num_tokens, num_heads, dim = q_THD.shape
    heads = min(TILE_HEADS, next_pow2(num_heads))
    bytes_THB = q_THD.view(torch.uint8)
    if num_tokens and num_heads:
        _queries_kernel[(num_tokens, -(-num_heads // heads))](
            q_THD, bytes_THB, weights_TH, rope.cos_TP, rope.sin_TP, scale,
            q_THD.stride(0), q_THD.stride(1), weights_TH.stride(0), num_heads,
            DIM=dim, ROPE=2 * rope.cos_TP.shape[-1], ROUNDING=rounding_code(rounding),
            KIND=FP32.value if q_THD.dtype == torch.float32 else BF16.value,
            CODES=codes, N=heads, D=next_pow2(dim), num_warps=4,
        )  # fmt: skip
    if codes:
        q_THD = bytes_THB[..., :dim].view(torch.float8_e4m3fn)
    return q_THD, weights_TH


def query_variants() -> tuple[KernelVariant, ...]:
    """bf16 queries as the releases round them, for fp8 keys and for all others."""
    return _variant(codes=False), _variant(codes=True)


def _variant(*, codes: bool) -> KernelVariant:
    signature = {
        "q_ptr": "*bf16", "code_ptr": "*u8", "weights_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
        "scale": "fp32", "q_token": "i32", "q_head": "i32", "weights_token": "i32", "num_heads": "i32",
    }  # fmt: skip
    return KernelVariant(
        name="queries-fp8" if codes else "queries",
        fn=_queries_kernel,
        signature=signature,
        constexprs={
            "DIM": 128, "ROPE": 64, "ROUNDING": HADAMARD_FP4_ROUNDING.value, "KIND": BF16.value,
            "CODES": codes, "N": TILE_HEADS, "D": 128,
        },
        aligned=tuple(name for name in signature if name != "scale"),
    )  # fmt: skip
