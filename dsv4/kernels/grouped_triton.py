"""Grouped GEMMs of the experts: rows sorted by expert in tiles, each tile times its expert's weight.

A tile is BLOCK_M consecutive places of one expert. The shared expert is one more group, of every token: its tiles come
first and are known without the sort. Which tile a row falls into, and where in it, does not change the row's bits.
Legend: R places (T * K picks by expert, then T tokens of the shared expert), I inner, D hidden, E experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import ExpertWeights
from dsv4.kernels.tile_triton import cast, to_fp32
from dsv4.triton_launch import TARGETS, KernelVariant, Tiling, dot_dtype

TILE_FIELDS = 4  # expert, first place, place behind the last, unused: one aligned load


# block_n: outputs of the second GEMM; of the first, gate and up of half as many inner channels.
FEW_ROWS = Tiling(16, 64, 128, 4, 4)
"""Bound by reading weights: small tiles make many programs, deep stages keep 20 KB loads in flight."""
SOME_ROWS = Tiling(64, 128, 64, 4, 4)
MANY_ROWS = Tiling(128, 256, 64, 8, 4)
FP32 = Tiling(16, 64, 32, 4, 2)
"""No tensor cores: products of registers."""
HIP_STAGES = 2  # the smallest shared memory there is 64 KiB


def tiling(x: Tensor, rows_per_expert: float, *, row_invariant: bool) -> Tiling:
    """One tiling whatever the number of rows if `row_invariant`: another shape sums in another order."""
    if x.dtype == torch.float32:
        return FP32
    if row_invariant:
        chosen = SOME_ROWS
    else:
        chosen = (
            FEW_ROWS if rows_per_expert <= 8 else SOME_ROWS if rows_per_expert <= 48 else MANY_ROWS
        )
    return on_hip(chosen) if torch.version.hip is not None else chosen


def on_hip(chosen: Tiling) -> Tiling:
    """The same tiles with as many stages as fit."""
    return Tiling(chosen.block_m, chosen.block_n, chosen.block_k, chosen.num_warps, HIP_STAGES)


@frozen(eq=False)
class Groups:
    """What the sort leaves on the device; sizes from capacities alone."""

    order_M: Tensor
    """Pick (token * K + k) at each place; places behind the last legal pick are undefined."""
    tiles: Tensor
    """[capacity, TILE_FIELDS] of the routed experts; the first `num_tiles[0]` are written."""
    num_tiles: Tensor


@triton.jit
def _operand(x, DOT: tl.constexpr):
    """Straight from memory to the tensor cores where the dtype is the dot's own."""
    if x.dtype == DOT:
        return x
    return to_fp32(x).to(DOT)


@triton.jit
def _tile(
    tile, tiles_ptr, order_ptr, num_picks, num_tokens, shared_tiles,
    TOPK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(is_shared, expert, place [BLOCK_M], ok, pick, token) of a tile; pick num_picks + t is token t's shared one."""
    is_shared = tile < shared_tiles
    record = tiles_ptr + (tile - shared_tiles) * 4
    expert = tl.load(record, mask=tile >= shared_tiles, other=0)
    first = tl.load(record + 1, mask=tile >= shared_tiles, other=0)
    end = tl.load(record + 2, mask=tile >= shared_tiles, other=0)
    first = tl.where(is_shared, num_picks + tile * BLOCK_M, first)
    end = tl.where(is_shared, num_picks + num_tokens, end)
    place = first + tl.arange(0, BLOCK_M)
    ok = place < end
    sorted_pick = tl.load(order_ptr + place, mask=ok & (place < num_picks), other=0)
    pick = tl.where(is_shared, place, sorted_pick)
    token = tl.where(is_shared, place - num_picks, sorted_pick // TOPK)
    return is_shared, expert, place, ok, pick, token


@triton.jit
def _product(
    a_ptrs, row_ok, w_ptrs, column_ok, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N] of rows [BLOCK_M, BLOCK_K] and columns [BLOCK_K, BLOCK_N] that run on for `depth`."""
    lane = tl.arange(0, BLOCK_K)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            a = tl.load(a_ptrs, mask=row_ok[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            real = start + lane < depth
            a = tl.load(a_ptrs, mask=row_ok[:, None] & real[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=real[:, None] & column_ok[None, :], other=0.0)
        product = tl.dot(_operand(a, DOT), _operand(w, DOT), product, input_precision="ieee")
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return product


@triton.jit(do_not_specialize=["num_picks", "num_tokens", "shared_tiles", "weights_stride"])
def up_kernel(
    x_ptr, w13_ptr, shared_w13_ptr, weights_ptr, tiles_ptr, num_tiles_ptr, order_ptr, inner_ptr,
    x_stride, weights_stride, expert_stride, hidden, width, shared_width, inner_stride, limit,
    num_picks, num_tokens, shared_tiles,
    TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """inner[place] = cast(weight * silu(clamped gate) * clamped up)."""
    DTYPE: tl.constexpr = inner_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_N // 2
    blocks_n = tl.cdiv(inner_stride, HALF)
    # Neighbours share a tile's rows; an expert's next tile follows while its weights are still in the L2.
    tile = tl.program_id(0) // blocks_n
    if tile >= shared_tiles + tl.load(num_tiles_ptr):
        return
    is_shared, expert, place, ok, pick, token = _tile(
        tile, tiles_ptr, order_ptr, num_picks, num_tokens, shared_tiles, TOPK, BLOCK_M
    )
    inner = tl.where(is_shared, shared_width, width)
    weight_ptr = tl.where(is_shared, shared_w13_ptr, w13_ptr + expert.to(tl.int64) * expert_stride)
    # One dot makes both: its first half of columns are gates, the second the ups of the same channels.
    begin = (tl.program_id(0) % blocks_n) * HALF
    column = tl.arange(0, BLOCK_N)
    channel = begin + column % HALF
    row = tl.where(column < HALF, channel, inner + channel)
    lane = tl.arange(0, BLOCK_K)
    gate_up = _product(
        x_ptr + token.to(tl.int64)[:, None] * x_stride + lane[None, :], ok,
        weight_ptr + row.to(tl.int64)[None, :] * hidden + lane[:, None], channel < inner, hidden,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN, DOT,
    )  # fmt: skip
    # As a linear layer's output has them; the clamp works on fp32 copies. Compares, not minimum: NaN stays NaN.
    gate_up = to_fp32(cast(gate_up, DTYPE))
    gate, up = tl.split(tl.permute(tl.reshape(gate_up, [BLOCK_M, 2, HALF]), (0, 2, 1)))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    weight_place = (pick // TOPK).to(tl.int64) * weights_stride + pick % TOPK
    weight = tl.load(weights_ptr + weight_place, mask=ok & (place < num_picks), other=1.0)
    y = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    channel = begin + tl.arange(0, HALF)
    inner_ptrs = inner_ptr + place.to(tl.int64)[:, None] * inner_stride + channel[None, :]
    tl.store(inner_ptrs, cast(y, DTYPE), mask=ok[:, None] & (channel < inner)[None, :])


@triton.jit(do_not_specialize=["num_picks", "num_tokens", "shared_tiles"])
def down_kernel(
    inner_ptr, w2_ptr, shared_w2_ptr, tiles_ptr, num_tiles_ptr, order_ptr, out_ptr,
    expert_stride, hidden, width, shared_width, inner_stride,
    num_picks, num_tokens, shared_tiles,
    TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out[pick] = w2 inner[place]."""
    blocks_n = tl.cdiv(hidden, BLOCK_N)
    tile = tl.program_id(0) // blocks_n
    if tile >= shared_tiles + tl.load(num_tiles_ptr):
        return
    is_shared, expert, place, ok, pick, _ = _tile(
        tile, tiles_ptr, order_ptr, num_picks, num_tokens, shared_tiles, TOPK, BLOCK_M
    )
    inner = tl.where(is_shared, shared_width, width)
    weight_ptr = tl.where(is_shared, shared_w2_ptr, w2_ptr + expert.to(tl.int64) * expert_stride)
    column = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    out = _product(
        inner_ptr + place.to(tl.int64)[:, None] * inner_stride + lane[None, :], ok,
        weight_ptr + column.to(tl.int64)[None, :] * inner + lane[:, None], column < hidden, inner,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN, DOT,
    )  # fmt: skip
    out_ptrs = out_ptr + pick.to(tl.int64)[:, None] * hidden + column[None, :]
    out_ok = ok[:, None] & (column < hidden)[None, :]
    tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=out_ok)


def grouped_swiglu(
    x_TD: Tensor,
    weights_TK: Tensor,
    weights: ExpertWeights,
    groups: Groups,
    tiles: Tiling,
    *,
    limit: float,
) -> Tensor:
    """[T * K + T, D] in x's dtype: every pick's expert output, then every token's shared one."""
    num_tokens, topk = weights_TK.shape
    hidden, num_picks = x_TD.shape[1], num_tokens * topk
    width, shared_width = weights.w2_EDI.shape[2], weights.shared_w2.shape[1]
    num_rows, inner_stride = num_picks + num_tokens, max(width, shared_width)
    inner = x_TD.new_empty(num_rows, inner_stride)
    out = x_TD.new_empty(num_rows, hidden)
    shared_tiles = -(-num_tokens // tiles.block_m)
    capacity = shared_tiles + groups.tiles.shape[0]
    blocks_n = (-(-2 * inner_stride // tiles.block_n), -(-hidden // tiles.block_n))
    shape = {
        "TOPK": topk, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k, "EVEN": _even(hidden, width, shared_width, tiles),
        "DOT": dot_dtype(x_TD), "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    up_kernel[(capacity * blocks_n[0],)](
        x_TD, weights.w13_EID, weights.shared_w13, weights_TK, groups.tiles, groups.num_tiles,
        groups.order_M, inner, x_TD.stride(0), weights_TK.stride(0), weights.w13_EID.stride(0),
        hidden, width, shared_width, inner_stride, limit if limit > 0 else math.inf,
        num_picks, num_tokens, shared_tiles, **shape,
    )  # fmt: skip
    down_kernel[(capacity * blocks_n[1],)](
        inner, weights.w2_EDI, weights.shared_w2, groups.tiles, groups.num_tiles,
        groups.order_M, out, weights.w2_EDI.stride(0), hidden, width, shared_width, inner_stride,
        num_picks, num_tokens, shared_tiles, **shape,
    )  # fmt: skip
    return out


def _even(hidden: int, width: int, shared_width: int, tiles: Tiling) -> bool:
    """Whether no tile reaches past a weight's edge, so that its loads need no masks."""
    inner_ok = all(
        n % tiles.block_k == 0 and 2 * n % tiles.block_n == 0 for n in (width, shared_width)
    )
    same = width == shared_width
    return same and inner_ok and hidden % tiles.block_k == 0 and hidden % tiles.block_n == 0


def variants() -> tuple[KernelVariant, ...]:
    """bf16 and even dims, with the stages that each vendor's shared memory takes."""
    found = []
    for name, tiles in (("few", FEW_ROWS), ("some", SOME_ROWS), ("many", MANY_ROWS)):
        for backend, staged in (("cuda", tiles), ("hip", on_hip(tiles))):
            targets = tuple(n for n, target in TARGETS.items() if target.backend == backend)
            for fn in (up_kernel, down_kernel):
                found.append(_variant(fn, f"{name}-{backend}", staged, targets))
    return tuple(found)


def _variant(fn: Any, name: str, tiles: Tiling, targets: tuple[str, ...]) -> KernelVariant:
    pointers = {name: "*bf16" for name in fn.arg_names if name.endswith("_ptr")}
    pointers |= {"tiles_ptr": "*i32", "num_tiles_ptr": "*i32", "order_ptr": "*i32"}
    if fn is up_kernel:
        pointers |= {"weights_ptr": "*fp32"}
    numbers = {n: "i32" for n in fn.arg_names if n.islower() and n not in {*pointers, "limit"}}
    varying = {"num_picks", "num_tokens", "shared_tiles", "weights_stride"}
    return KernelVariant(
        name=f"experts-{fn.__name__.removesuffix('_kernel')}-{name}",
        fn=fn,
        signature=pointers | numbers | ({"limit": "fp32"} if fn is up_kernel else {}),
        constexprs={
            "TOPK": 6, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k, "EVEN": True, "DOT": tl.bfloat16,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=tuple(name for name in (*pointers, *numbers) if name not in varying),
        targets=targets,
    )  # fmt: skip
