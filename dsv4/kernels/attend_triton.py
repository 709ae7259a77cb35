"""Attend in Triton: gathered rows of one or two sources in one softmax, a token's rows split where tokens are few.

One program takes M heads of a token and walks over tiles of N rows. Legend: T tokens, H heads, D head dim, P half the
rope width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.attend_plan_triton import (
    EXACT,
    FEW,
    NARROW,
    TENSOR_MEMORY,
    WIDE,
    Launch,
    Plan,
    Tile,
    launches_of,
)
from dsv4.kernels.attend_plan_triton import plan as plan_of
from dsv4.kernels.attend_tiles_triton import (
    FRESH_BY_ADDRESS,
    FRESH_BY_LOAD,
    LOG2_E,
    NO_FRESH,
    finish,
    is_row,
    load_packed,
    load_plain,
    mass_shape,
    operand,
    rope_back,
    step,
    tile_indices,
)
from dsv4.kernels.base import AttentionKernel
from dsv4.kernels.combine_triton import (
    combine_parts,
    combine_variants,
    lse_args,
    rope_args,
    rope_width,
    strides,
)
from dsv4.kernels.rows_triton import BF16, FP32, PACKED_FP8
from dsv4.kernels.tile_triton import cast
from dsv4.metadata.plans import RopeTable, Source, Workspace
from dsv4.triton_launch import (
    KernelVariant,
    interpreting,
    next_pow2,
    overlaps_launches,
    supports_native_fp8,
)


@triton.jit(
    do_not_specialize=[
        "a_rows", "a_fresh_rows", "b_rows", "b_fresh_rows", "first_part", "num_parts", "part_rows",
    ],
    do_not_specialize_on_alignment=["a_indptr", "a_indices", "b_indptr", "b_indices"],
)  # fmt: skip
def _attend_kernel(
    q_ptr, q_token, q_head, sink_ptr, scale_log2, out_ptr, out_token, out_head, lse_ptr, lse_token, lse_head,
    cos_ptr, sin_ptr, rope_token, part_ptr, first_part, num_parts, part_rows,
    a_table, a_stride, a_rows, a_fresh, a_fresh_stride, a_fresh_rows, a_indptr, a_indices,
    b_table, b_stride, b_rows, b_fresh, b_fresh_stride, b_fresh_rows, b_indptr, b_indices,
    SOURCES: tl.constexpr, SAME_TABLE: tl.constexpr, FRESH: tl.constexpr, KIND: tl.constexpr,
    PLANE_ROWS: tl.constexpr, FAST: tl.constexpr, ALIGNED: tl.constexpr, NATIVE: tl.constexpr,
    HEADS: tl.constexpr, ROW_DIM: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    PARTS: tl.constexpr, LSE: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr, DOT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    STAGES: tl.constexpr, EAGER: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """M heads of one token over all of its tiles, or with PARTS over one of equal shares of them.

    NOPE: channels of a packed row that are codes; ROPE: channels that are rotated back, 0 = none. FOLLOWS: launched
    while the kernel in front of it ends; LEADS: lets the next one be launched so.
    """
    if FOLLOWS:
        # for what the kernel in front of this one leaves; only then may the next one start, which relies on this wait
        tl.extra.cuda.gdc_wait()
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    groups: tl.constexpr = (HEADS + M - 1) // M
    token = tl.program_id(0) // groups
    head = (tl.program_id(0) % groups) * M + tl.arange(0, M)
    a_start = tl.load(a_indptr + token)
    a_end = tl.load(a_indptr + token + 1)
    b_start = a_end
    b_end = a_end
    tiles_a = tl.cdiv(a_end - a_start, N)
    last = tiles_a
    if SOURCES == 2:
        b_start = tl.load(b_indptr + token)
        b_end = tl.load(b_indptr + token + 1)
        last += tl.cdiv(b_end - b_start, N)
    first = 0
    if PARTS:
        share = tl.cdiv(last, tl.num_programs(1))
        first = tl.program_id(1) * share
        last = tl.minimum(first + share, last)
    # Indices are loaded a tile ahead, so that rows never wait for them.
    lists = (tiles_a, a_indices, a_start, a_end, b_indices, b_start, b_end)
    index = tile_indices(first, lists, SOURCES, N)
    lane = tl.arange(0, D)[None, :]
    token64 = token.to(tl.int64)
    head64 = head.to(tl.int64)[:, None]
    there = (head[:, None] < HEADS) & (lane < ROW_DIM)
    q_place = q_ptr + token64 * q_token + head64 * q_head + lane
    if HEADS % M == 0 and D == ROW_DIM:
        q = operand(tl.load(q_place), DOT)
    else:
        q = operand(tl.load(q_place, mask=there, other=0.0), DOT)
    top = tl.full([M], -float("inf"), tl.float32)
    mass = tl.zeros(mass_shape(M, N), tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        in_b = tile >= tiles_a
        table = a_table
        stride = a_stride
        num_rows = a_rows
        fresh = a_fresh
        fresh_stride = a_fresh_stride
        fresh_rows = a_fresh_rows
        if SOURCES == 2 and not SAME_TABLE:
            table = tl.where(in_b, b_table, table)
            stride = tl.where(in_b, b_stride, stride)
            num_rows = tl.where(in_b, b_rows, num_rows)
        if SOURCES == 2 and FRESH:
            fresh = tl.where(in_b, b_fresh, fresh)
            fresh_stride = tl.where(in_b, b_fresh_stride, fresh_stride)
            fresh_rows = tl.where(in_b, b_fresh_rows, fresh_rows)
        segment = (table, stride, num_rows, fresh, fresh_stride, fresh_rows)
        limit = num_rows
        if FRESH:
            limit += fresh_rows
        ok = is_row(index, limit)
        if FRESH == FRESH_BY_LOAD:
            ok &= index < num_rows
        if KIND != PACKED_FP8:
            raw = load_plain(segment, index, ok, ROW_DIM, FRESH, ALIGNED, D)
        elif FAST:
            raw = load_packed(segment, index, ok, NOPE, PLANE_ROWS, D)
        else:
            raw = 0
        index = tile_indices(tile + 1, lists, SOURCES, N)
        if EAGER:
            # Always true. Work inside a branch is scheduled behind the loop's loads: the next tile's rows are requested
            # before this tile's products, which do not overlap with one another then.
            if tile < last:
                top, mass, acc = step(
                    q, raw, segment, lists, tile, limit, scale_log2, top, mass, acc, SOURCES, KIND, FAST, NATIVE, FRESH,
                    ROW_DIM, NOPE, PLANE_ROWS, DOT, SPREAD, M, N, D,
                )  # fmt: skip
        else:
            top, mass, acc = step(
                q, raw, segment, lists, tile, limit, scale_log2, top, mass, acc, SOURCES, KIND, FAST, NATIVE, FRESH,
                ROW_DIM, NOPE, PLANE_ROWS, DOT, SPREAD, M, N, D,
            )  # fmt: skip
    total = tl.sum(tl.sum(mass, 2), 1)
    if PARTS:
        row = (token64 * HEADS + head) * num_parts + first_part + tl.program_id(1)
        filled = tl.zeros([1, 1], tl.int32) + first < last
        tl.store(part_ptr + row[:, None] * ROW_DIM + lane, acc, mask=there & filled)
        sums = part_ptr + part_rows.to(tl.int64) * ROW_DIM + row * 2
        tl.store(sums, top, mask=head < HEADS)
        tl.store(sums + 1, total, mask=head < HEADS)
    else:
        sink = tl.load(sink_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
        result, lse = finish(acc, top, total, sink)
        if ROPE:
            place = token64 * rope_token
            result = rope_back(
                result, cos_ptr + place, sin_ptr + place, 0, ROW_DIM - ROPE, ROPE, M, D
            )
        out_place = out_ptr + token64 * out_token + head64 * out_head + lane
        tl.store(out_place, cast(result, out_ptr.dtype.element_ty), mask=there)
        if LSE:
            tl.store(lse_ptr + token64 * lse_token + head * lse_head, lse, mask=head < HEADS)


class TritonAttention(AttentionKernel):
    """One launch for up to two sources of one row format, and a second one where rows are split. Further sources get
    launches of their own, which are combined as the parts of split rows are; that alone allocates, if the workspace
    is too small. Deterministic: rows are never split, and one tile shape serves all row formats and batches."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def attend(
        self,
        q_THD: Tensor,
        sources: Sequence[Source],
        sink_H: Tensor,
        *,
        scale: float,
        out_THD: Tensor,
        lse_TH: Tensor | None = None,
        rope: RopeTable | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        if scale <= 0:
            raise KernelError(
                f"attend: scale {scale} must be above 0: scores of no row are -inf before they are scaled"
            )
        if q_THD.numel() == 0:
            return
        launches = launches_of(sources)
        if not launches:
            out_THD.zero_()
            if lse_TH is not None:
                lse_TH.fill_(-torch.inf)
            return
        call = Call(q_THD, sink_H, scale, out_THD, lse_TH, rope)
        scratch = None if workspace is None else workspace.partials
        plan = self._plan(q_THD, launches, scratch)
        if plan.parts * len(launches) == 1:
            _attend(call, launches[0], plan, None)
        else:
            _attend_in_parts(call, launches, plan, scratch)

    def _plan(self, q_THD: Tensor, launches: Sequence[Launch], scratch: Tensor | None) -> Plan:
        return plan_of(q_THD, launches, None if self._deterministic else scratch)


@frozen(eq=False)
class Call:
    """What all launches of a call share."""

    q_THD: Tensor
    sink_H: Tensor
    scale: float
    out_THD: Tensor
    lse_TH: Tensor | None
    rope: RopeTable | None


@frozen(eq=False)
class Parts:
    """Where a launch leaves its parts of each token and head: [first, first + of the plan) out of `total`."""

    scratch: Tensor
    first: int
    total: int
    early: bool
    """The kernel that combines them may start before this one ends."""


def _attend_in_parts(
    call: Call, launches: Sequence[Launch], plan: Plan, scratch: Tensor | None
) -> None:
    num_tokens, num_heads, dim = call.q_THD.shape
    total = plan.parts * len(launches)
    needed = total * num_tokens * num_heads * (dim + 2)
    if scratch is None or scratch.numel() < needed:
        scratch = torch.empty(needed, dtype=torch.float32, device=call.q_THD.device)
    early = overlaps_launches(call.q_THD.device)
    for i, launch in enumerate(launches):
        last = i + 1 == len(launches)
        _attend(call, launch, plan, Parts(scratch, i * plan.parts, total, early and last))
    combine_parts(
        scratch, total, call.sink_H, out_THD=call.out_THD, lse_TH=call.lse_TH, rope=call.rope,
        after_launch=early,
    )  # fmt: skip


def _attend(call: Call, launch: Launch, plan: Plan, parts: Parts | None) -> None:
    """One walk over one or two segments, to the end if there are no parts."""
    q_THD, out_THD, tile, fresh = call.q_THD, call.out_THD, plan.tile, launch.fresh_mode
    num_tokens, num_heads, dim = q_THD.shape
    lse_TH, rope = (call.lse_TH, call.rope) if parts is None else (None, None)
    # Plain rows that are read twice and chosen between need a third tile in shared memory.
    twice = fresh == FRESH_BY_LOAD.value and not launch.packed
    stages = 1 if twice else tile.num_stages
    follows = overlaps_launches(q_THD.device)
    where: tuple[Tensor | None, int, int, int] = (None, 0, 0, 0)
    if parts is not None:
        where = parts.scratch, parts.first, parts.total, num_tokens * num_heads * parts.total
    _attend_kernel[(num_tokens * -(-num_heads // tile.heads), plan.parts)](
        q_THD, *strides(q_THD), call.sink_H, call.scale * LOG2_E.value, out_THD, *strides(out_THD),
        *lse_args(lse_TH), *rope_args(rope), *where, *launch.args(),
        SOURCES=len(launch.segments), SAME_TABLE=launch.same_table, FRESH=fresh, KIND=launch.rows.kind,
        PLANE_ROWS=launch.rows.plane_rows, FAST=launch.published, ALIGNED=launch.aligned,
        NATIVE=supports_native_fp8(q_THD.device), HEADS=num_heads, ROW_DIM=dim, NOPE=launch.rows.nope,
        ROPE=rope_width(rope), PARTS=parts is not None, LSE=lse_TH is not None,
        LEADS=parts is not None and parts.early, FOLLOWS=follows,
        DOT=tl.float32 if plan.exact or interpreting() else tl.bfloat16,
        M=tile.heads, N=tile.rows, D=max(16, next_pow2(dim)), STAGES=stages, EAGER=tile.eager, SPREAD=tile.spread,
        num_warps=tile.num_warps, num_stages=stages, **({"launch_pdl": True} if follows else {}),
    )  # fmt: skip


HOPPER_ONLY, BLACKWELL_ONLY, NVIDIA, AMD = (
    ("sm_90",), ("sm_100",), ("sm_90", "sm_100"), ("gfx942", "gfx950"),
)  # fmt: skip


def _variant(
    name: str, tile: Tile, kind: int, targets: tuple[str, ...], *, heads: int = 64, sources: int = 2,
    same_table: bool = True, fresh: int = NO_FRESH.value, parts: bool = False,
) -> KernelVariant:  # fmt: skip
    values = "*fp32" if kind == FP32.value else "*bf16"
    table = "*u8" if kind == PACKED_FP8.value else values
    strides = ("token", "head")
    signature = {"q_ptr": values, "sink_ptr": "*fp32", "scale_log2": "fp32", "out_ptr": values}
    signature |= {f"{x}_{s}": "i32" for x in ("q", "out") for s in strides}
    for s in "ab":
        signature |= {
            f"{s}_table": table,
            f"{s}_fresh": "*bf16" if fresh == FRESH_BY_LOAD.value else table,
        }
        signature |= {f"{s}_{x}": "i32" for x in ("stride", "rows", "fresh_stride", "fresh_rows")}
        signature |= {f"{s}_indptr": "*i32", f"{s}_indices": "*i32"}
    constexprs: dict[str, object] = {f"lse_{x}": 0 for x in strides} | {
        "lse_ptr": None,
        "LSE": False,
    }
    if parts:
        signature |= {
            "part_ptr": "*fp32",
            "first_part": "i32",
            "num_parts": "i32",
            "part_rows": "i32",
        }
        constexprs |= {"cos_ptr": None, "sin_ptr": None, "rope_token": 0, "ROPE": 0}
    else:
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "rope_token": "i32"}
        constexprs |= {
            "part_ptr": None,
            "first_part": 0,
            "num_parts": 0,
            "part_rows": 0,
            "ROPE": 64,
        }
    constexprs |= {
        "SOURCES": sources, "SAME_TABLE": same_table, "FRESH": fresh, "KIND": kind, "PLANE_ROWS": 64,
        "FAST": kind == PACKED_FP8.value, "ALIGNED": True, "NATIVE": targets != AMD, "HEADS": heads, "ROW_DIM": 512,
        "NOPE": 448 if kind == PACKED_FP8.value else 512, "PARTS": parts, "LEADS": parts and targets != AMD,
        "FOLLOWS": not set(targets) & set(AMD),
        "DOT": tl.float32 if kind == FP32.value else tl.bfloat16, "M": tile.heads, "N": tile.rows, "D": 512,
        "STAGES": tile.num_stages, "EAGER": tile.eager, "SPREAD": tile.spread,
    }  # fmt: skip
    odd = ("scale_log2", "first_part", "num_parts", "part_rows")
    return KernelVariant(
        name=f"attend-{name}", fn=_attend_kernel, signature=signature, constexprs=constexprs,
        num_warps=tile.num_warps, num_stages=tile.num_stages, targets=targets,
        aligned=tuple(x for x in signature if x not in odd and not x.endswith(("rows", "indptr", "indices"))),
    )  # fmt: skip


def variants() -> tuple[KernelVariant, ...]:
    """What Flash (64 heads, unified pool) and Pro (128 heads, three pools) choose, and the combining kernels."""
    bf16, fp8 = BF16.value, PACKED_FP8.value
    by_address, by_load = FRESH_BY_ADDRESS.value, FRESH_BY_LOAD.value
    three: Any = {"heads": 128, "same_table": False}
    return (
        _variant("flash", WIDE, bf16, HOPPER_ONLY, fresh=by_address),
        _variant("pro-parts", WIDE, bf16, HOPPER_ONLY, parts=True, **three),
        _variant("pro-fp8", WIDE, fp8, HOPPER_ONLY, **three),
        _variant("pro-fp8-chunk", WIDE, fp8, HOPPER_ONLY, fresh=by_load, **three),
        _variant("flash-blackwell", TENSOR_MEMORY, bf16, BLACKWELL_ONLY, fresh=by_address),
        _variant("pro-fp8-blackwell", TENSOR_MEMORY, fp8, BLACKWELL_ONLY, **three),
        _variant("flash-one", NARROW, bf16, NVIDIA, parts=True),
        _variant("flash-fp8-one", NARROW, fp8, NVIDIA, parts=True),
        _variant("flash-few", FEW, bf16, NVIDIA, parts=True),
        _variant("flash-hip", NARROW, bf16, AMD, fresh=by_address),
        _variant("pro-fp8-hip", NARROW, fp8, AMD, fresh=by_load, **three),
        _variant("exact", EXACT, FP32.value, (*NVIDIA, *AMD), fresh=by_address),
        *combine_variants(),
    )
