"""Routing in one launch behind the logits GEMM: scores, choice or table lookup, normalised weights.

Legend: T tokens, E experts, K experts a token, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.triton_launch import KernelVariant, next_pow2

NUM_WARPS = 1  # a token's experts fit one warp: reductions stay in registers


@triton.jit
def _scores(logits):
    """sqrt(softplus). Adding log1p(exp(-|x|)) to max(x, 0) is torch's softplus with its threshold 20: in fp32 the sum
    is x from 17 on. log1p by the rounding error of 1 + e, which stays exact for small e."""
    small = tl.exp(-tl.abs(logits))
    one_up = 1.0 + small
    lifted = one_up - 1.0
    log1p = tl.where(
        lifted == 0.0, small, tl.log(one_up) * (small / tl.where(lifted == 0.0, 1.0, lifted))
    )
    return tl.sqrt_rn(tl.maximum(logits, 0.0) + log1p)


@triton.jit
def _write(
    logits_ptr, chosen_ptr, weights_ptr, token, picks, legal, stride, factor,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The picks and their unbiased scores, normalised, times factor."""
    lane = tl.arange(0, BLOCK_K)
    used = lane < TOPK
    read = used & legal
    logits = tl.load(logits_ptr + token.to(tl.int64) * stride + picks, mask=read, other=0.0)
    scores = tl.where(read, _scores(logits), 0.0)
    weights = tl.div_rn(scores, tl.where(legal, tl.sum(scores, 0), 1.0)) * factor
    place = token.to(tl.int64) * TOPK + lane
    tl.store(chosen_ptr + place, tl.where(legal, picks, -1), mask=used)
    tl.store(weights_ptr + place, tl.where(legal, weights, 0.0), mask=used)


@triton.jit
def _best_kernel(
    logits_ptr, bias_ptr, chosen_ptr, weights_ptr, stride, num_experts, factor,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The TOPK best of score + bias, best first; the lower expert wins a tie."""
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < num_experts
    logits = tl.load(logits_ptr + token.to(tl.int64) * stride + expert, mask=is_expert, other=0.0)
    ranked = _scores(logits) + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    # One integer orders by value, then by lower expert. Adding 0 turns -0 into 0, which it equals.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (BLOCK_E - 1 - expert).to(tl.int64)
    NONE: tl.constexpr = -(2**63)
    key = tl.where(is_expert, key, NONE)
    lane = tl.arange(0, BLOCK_K)
    picks = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOPK):
        best = tl.max(key, 0)
        picks = tl.where(lane == k, BLOCK_E - 1 - (best & 0xFFFFFFFF).to(tl.int32), picks)
        key = tl.where(key == best, NONE, key)
    legal = picks < num_experts
    _write(
        logits_ptr, chosen_ptr, weights_ptr, token, picks, legal, stride, factor, TOPK, BLOCK_K
    )  # fmt: skip


@triton.jit
def _table_kernel(
    logits_ptr, table_ptr, ids_ptr, chosen_ptr, weights_ptr, stride, num_experts, vocab, factor,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The experts that the table names for a token id; an id or expert outside the table is no expert."""
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    token_id = tl.load(ids_ptr + token).to(tl.int64)
    token_ids = token_id + tl.zeros([BLOCK_K], tl.int64)
    known = (token_ids >= 0) & (token_ids < vocab) & (lane < TOPK)
    place = tl.where(known, token_ids, 0) * TOPK + lane
    picks = tl.load(table_ptr + place, mask=known, other=-1).to(tl.int32)
    legal = (picks >= 0) & (picks < num_experts)
    _write(
        logits_ptr, chosen_ptr, weights_ptr, token, picks, legal, stride, factor, TOPK, BLOCK_K
    )  # fmt: skip


def choose_best(
    logits_TE: Tensor, bias_E: Tensor, *, topk: int, factor: float
) -> tuple[Tensor, Tensor]:
    """(experts int32 [T, K], weights fp32 [T, K]) of fp32 logits with dense rows."""
    chosen_TK, weights_TK = _outputs(logits_TE, topk)
    num_tokens, num_experts = logits_TE.shape
    if num_tokens:
        _best_kernel[(num_tokens,)](
            logits_TE, bias_E, chosen_TK, weights_TK, logits_TE.stride(0), num_experts, factor,
            TOPK=topk, BLOCK_K=next_pow2(topk), BLOCK_E=next_pow2(num_experts), num_warps=NUM_WARPS,
        )  # fmt: skip
    return chosen_TK, weights_TK


def look_up(
    logits_TE: Tensor, table_VK: Tensor, token_ids_T: Tensor, *, topk: int, factor: float
) -> tuple[Tensor, Tensor]:
    """The same with the experts of a table [V, K]."""
    chosen_TK, weights_TK = _outputs(logits_TE, topk)
    num_tokens, num_experts = logits_TE.shape
    if num_tokens:
        _table_kernel[(num_tokens,)](
            logits_TE, table_VK, token_ids_T, chosen_TK, weights_TK, logits_TE.stride(0),
            num_experts, table_VK.shape[0], factor,
            TOPK=topk, BLOCK_K=next_pow2(topk), num_warps=NUM_WARPS,
        )  # fmt: skip
    return chosen_TK, weights_TK


def variants() -> tuple[KernelVariant, ...]:
    """For the published dims: 6 of 256 (Flash) or 384 (Pro) experts; the table also in Flash's first layers."""
    pointers = {"logits_ptr": "*fp32", "chosen_ptr": "*i32", "weights_ptr": "*fp32"}
    numbers = {"stride": "i32", "num_experts": "i32", "factor": "fp32"}
    return (
        KernelVariant(
            name="route-best",
            fn=_best_kernel,
            signature=pointers | {"bias_ptr": "*fp32"} | numbers,
            constexprs={"TOPK": 6, "BLOCK_K": 8, "BLOCK_E": 512},
            num_warps=NUM_WARPS,
            aligned=(*pointers, "bias_ptr", "stride", "num_experts"),
        ),
        KernelVariant(
            name="route-table",
            fn=_table_kernel,
            signature=pointers | {"table_ptr": "*i64", "ids_ptr": "*i64", "vocab": "i32"} | numbers,
            constexprs={"TOPK": 6, "BLOCK_K": 8},
            num_warps=NUM_WARPS,
            aligned=(*pointers, "table_ptr", "stride", "num_experts", "vocab"),
        ),
    )


def _outputs(logits_TE: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape, device = (logits_TE.shape[0], topk), logits_TE.device
    return (
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
