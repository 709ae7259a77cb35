"""Mixture of experts without a host sync: sort the picks by expert, two grouped GEMMs, one sum per token.

Legend: T tokens, D hidden, K experts a token, E experts, I intermediate, M picks (T * K).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels import grouped_triton, route_triton
from dsv4.kernels.base import ExpertsKernel, ExpertWeights, LinearKernel
from dsv4.kernels.grouped_triton import TILE_FIELDS, Groups, grouped_swiglu, tiling
from dsv4.kernels.route_triton import choose_best, look_up
from dsv4.kernels.tile_triton import cast, to_fp32
from dsv4.triton_launch import KernelVariant, Tiling, next_pow2

BLOCK_PICKS = 1024
SORT_WARPS = 8
BLOCK_D = 512
SUM_WARPS = 2  # 8 values a thread: 16-byte loads of bf16


@triton.jit
def _picked(chosen_ptr, chosen_stride, pick, num_picks, num_experts, TOPK: tl.constexpr, NONE):
    """Expert of each pick; NONE where it is no expert or no pick."""
    place = (pick // TOPK).to(tl.int64) * chosen_stride + pick % TOPK
    expert = tl.load(chosen_ptr + place, mask=pick < num_picks, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, NONE).to(tl.int32)


@triton.jit(do_not_specialize=["num_picks", "chosen_stride"])
def _sort_kernel(
    chosen_ptr, order_ptr, tiles_ptr, num_tiles_ptr, chosen_stride, num_picks, num_experts,
    TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e counts every expert's picks, so it knows where e's begin without waiting for another program; then it
    places e's picks in ascending order and describes e's tiles."""
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_picks, BLOCK):
        expert = _picked(
            chosen_ptr, chosen_stride, start + lane, num_picks, num_experts, TOPK, BINS - 1
        )
        counts += tl.histogram(expert, BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < own, tiles, 0), 0)
    count = tl.sum(tl.where(bins == own, counts, 0), 0)
    if own == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    for start in range(0, count, BLOCK * BLOCK_M):
        begin = start + lane * BLOCK_M
        record = tiles_ptr + (first_tile + begin // BLOCK_M) * 4
        real = begin < count
        tl.store(record, own + tl.zeros_like(begin), mask=real)
        tl.store(record + 1, first + begin, mask=real)
        tl.store(record + 2, first + tl.minimum(begin + BLOCK_M, count), mask=real)
    if count > 0:
        done = 0
        for start in range(0, num_picks, BLOCK):
            pick = start + lane
            expert = _picked(
                chosen_ptr, chosen_stride, pick, num_picks, num_experts, TOPK, BINS - 1
            )
            mine = (expert == own).to(tl.int32)
            rank = done + tl.cumsum(mine, 0) - 1
            tl.store(order_ptr + first + rank, pick, mask=mine != 0)
            done += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["num_picks", "chosen_stride"])
def _sum_kernel(
    out_ptr, chosen_ptr, y_ptr, chosen_stride, num_picks, num_experts, hidden,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A token's picks in ascending expert order, then the shared expert."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channel < hidden
    lane = tl.arange(0, BLOCK_K)
    chosen = chosen_ptr + token.to(tl.int64) * chosen_stride + lane
    expert = tl.load(chosen, mask=lane < TOPK, other=-1)
    legal = (expert >= 0) & (expert < num_experts)
    shared_row = num_picks + token.to(tl.int64)
    total = tl.zeros([BLOCK_D], tl.float32)
    # Of equal experts the earlier pick comes first, as in the sort.
    key = tl.where(legal, expert.to(tl.int32) * BLOCK_K + lane, 0x7FFFFFFF)
    for _ in tl.static_range(TOPK):
        least = tl.min(key, 0)
        key = tl.where(key == least, 0x7FFFFFFF, key)
        real = least != 0x7FFFFFFF
        # The row of a pick that is no expert was never written.
        row = tl.where(real, token.to(tl.int64) * TOPK + least % BLOCK_K, shared_row)
        part = to_fp32(tl.load(out_ptr + row * hidden + channel, mask=inside, other=0.0))
        total += tl.where(real, part, 0.0)
    shared = tl.load(out_ptr + shared_row * hidden + channel, mask=inside, other=0.0)
    place = y_ptr + token.to(tl.int64) * hidden + channel
    tl.store(place, cast(total + to_fp32(shared), DTYPE), mask=inside)


class TritonExperts(ExpertsKernel):
    """Shapes and grids depend on T, K and E alone: capturable. `linear` computes the router's logits."""

    def __init__(self, linear: LinearKernel, *, deterministic: bool = False) -> None:
        self._linear, self._deterministic = linear, deterministic

    def route(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        *,
        topk: int,
        factor: float,
        token_ids_T: Tensor,
        bias_E: Tensor | None,
        table_VK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logits_TE = self._linear.linear(x_TD.float(), weight_ED)
        if table_VK is not None:
            return look_up(logits_TE, table_VK, token_ids_T, topk=topk, factor=factor)
        assert bias_E is not None
        return choose_best(logits_TE, bias_E, topk=topk, factor=factor)

    def experts(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        weights: ExpertWeights,
        *,
        limit: float,
    ) -> Tensor:
        (num_tokens, hidden), topk = x_TD.shape, chosen_TK.shape[1]
        y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        if num_tokens == 0:
            return y_TD
        num_experts = weights.w2_EDI.shape[0]
        x_TD, chosen_TK, weights_TK = (_dense_rows(t) for t in (x_TD, chosen_TK, weights_TK))
        tiles = tiling(x_TD, num_tokens * topk / num_experts, row_invariant=self._deterministic)
        groups = sort_by_expert(chosen_TK, num_experts, tiles)
        out = grouped_swiglu(x_TD, weights_TK, weights, groups, tiles, limit=limit)
        _sum_kernel[(num_tokens, -(-hidden // BLOCK_D))](
            out, chosen_TK, y_TD, chosen_TK.stride(0), num_tokens * topk, num_experts, hidden,
            TOPK=topk, BLOCK_K=next_pow2(topk), BLOCK_D=BLOCK_D, num_warps=SUM_WARPS,
        )  # fmt: skip
        return y_TD


def sort_by_expert(chosen_TK: Tensor, num_experts: int, tiles: Tiling) -> Groups:
    """Stable; picks outside [0, num_experts) belong to no tile."""
    num_picks, device = chosen_TK.numel(), chosen_TK.device
    # Each expert has at most one tile that is not full, and none without a pick.
    capacity = min(num_picks, num_picks // tiles.block_m + num_experts)
    groups = Groups(
        order_M=torch.empty(num_picks, dtype=torch.int32, device=device),
        tiles=torch.empty(capacity, TILE_FIELDS, dtype=torch.int32, device=device),
        num_tiles=torch.empty(1, dtype=torch.int32, device=device),
    )
    _sort_kernel[(num_experts,)](
        chosen_TK, groups.order_M, groups.tiles, groups.num_tiles, chosen_TK.stride(0),
        num_picks, num_experts, TOPK=chosen_TK.shape[1], BLOCK_M=tiles.block_m,
        BINS=next_pow2(num_experts + 1), BLOCK=BLOCK_PICKS, num_warps=SORT_WARPS,
    )  # fmt: skip
    return groups


def variants() -> tuple[KernelVariant, ...]:
    """Every configuration for the published dims in bf16: Flash has 256 experts, Pro 384."""
    sort = KernelVariant(
        name="experts-sort",
        fn=_sort_kernel,
        signature={
            "chosen_ptr": "*i32", "order_ptr": "*i32", "tiles_ptr": "*i32", "num_tiles_ptr": "*i32",
            "chosen_stride": "i32", "num_picks": "i32", "num_experts": "i32",
        },
        constexprs={
            "TOPK": 6, "BLOCK_M": grouped_triton.FEW_ROWS.block_m, "BINS": 512,
            "BLOCK": BLOCK_PICKS,
        },
        num_warps=SORT_WARPS,
        aligned=("chosen_ptr", "order_ptr", "tiles_ptr", "num_tiles_ptr", "num_experts"),
    )  # fmt: skip
    total = KernelVariant(
        name="experts-sum",
        fn=_sum_kernel,
        signature={
            "out_ptr": "*bf16", "chosen_ptr": "*i32", "y_ptr": "*bf16",
            "chosen_stride": "i32", "num_picks": "i32", "num_experts": "i32", "hidden": "i32",
        },
        constexprs={"TOPK": 6, "BLOCK_K": 8, "BLOCK_D": BLOCK_D},
        num_warps=SUM_WARPS,
        aligned=("out_ptr", "chosen_ptr", "y_ptr", "num_experts", "hidden"),
    )  # fmt: skip
    return (*route_triton.variants(), sort, *grouped_triton.variants(), total)


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
