"""Store in one launch: norm and rotate queries in place; norm, rotate, round and scatter KV.

Legend: T tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.base import Rounding, StoreKernel
from dsv4.kernels.norm_triton import rms_scale
from dsv4.kernels.rows_triton import (
    BF16,
    FP8_ROUNDING,
    FP32,
    PACKED_FP8,
    RowArgs,
    rounded,
    rounding_code,
    row_args,
    store_rows,
    stored,
)
from dsv4.kernels.tile_triton import cast, load_rope, rotate, to_fp32
from dsv4.metadata.plans import RopeTable
from dsv4.pool.base import KVView
from dsv4.triton_launch import KernelVariant, next_pow2

TILE = 4096  # values a program holds: 32 a thread, which leaves registers for 12 programs a multiprocessor
KV_TOKENS = 4  # one row a warp: sums stay inside the warp
NUM_WARPS = 4


class TritonStore(StoreKernel):
    def store(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        *,
        kv_norm: Tensor,
        eps: float,
        rope: RopeTable,
        store_loc_T: Tensor,
        view: KVView,
        rounding: Rounding,
        fresh_TD: Tensor | None,
    ) -> Tensor:
        num_tokens, num_heads, _ = q_THD.shape
        if num_tokens == 0:
            return q_THD
        rows = row_args(view)
        config = _config(num_heads, rows.row_dim)
        kv_programs = triton.cdiv(num_tokens, KV_TOKENS)
        groups = triton.cdiv(num_heads, config["HEADS"])
        # Without fresh rows the argument is never followed; one of the same dtype spares a compilation.
        fresh = kv_TD if fresh_TD is None else fresh_TD
        _store_kernel[(kv_programs + num_tokens * groups,)](
            q_THD,
            q_THD.stride(0),
            q_THD.stride(1),
            kv_TD,
            kv_TD.stride(0),
            kv_norm,
            eps,
            rope.cos_TP,
            rope.sin_TP,
            store_loc_T,
            rows.storage,
            rows.stride,
            rows.num_rows,
            fresh,
            fresh.stride(0),
            0 if fresh_TD is None else num_tokens,
            num_tokens,
            num_heads,
            kv_programs,
            ROUNDING=rounding_code(rounding),
            ROPE=2 * rope.cos_TP.shape[-1],
            **_row_constants(rows),
            **config,
        )
        return q_THD

    def store_tail(self, fresh_TD: Tensor, *, tail_loc_T: Tensor, view: KVView) -> None:
        num_tokens = fresh_TD.shape[0]
        if num_tokens == 0:
            return
        rows = row_args(view)
        _store_tail_kernel[(triton.cdiv(num_tokens, KV_TOKENS),)](
            fresh_TD,
            fresh_TD.stride(0),
            tail_loc_T,
            rows.storage,
            rows.stride,
            rows.num_rows,
            num_tokens,
            NOPE=rows.nope,
            TOKENS=KV_TOKENS,
            D=next_pow2(rows.row_dim),
            **_row_constants(rows),
            num_warps=NUM_WARPS,
        )


def _config(num_heads: int, head_dim: int) -> dict[str, int]:
    """Tile shapes: the same for every batch, so that a token's bits never depend on it."""
    width = next_pow2(head_dim)
    heads = min(next_pow2(num_heads), max(TILE // width, 1))
    return {"HEADS": heads, "TOKENS": KV_TOKENS, "D": width, "num_warps": NUM_WARPS}


def _row_constants(rows: RowArgs) -> dict[str, int]:
    return {"KIND": rows.kind, "ROW_DIM": rows.row_dim, "PLANE_ROWS": rows.plane_rows}


@triton.jit(do_not_specialize=["num_rows", "num_fresh", "num_tokens", "num_heads", "kv_programs"])
def _store_kernel(
    q_ptr,
    q_token_stride,
    q_head_stride,
    kv_ptr,
    kv_stride,
    norm_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    loc_ptr,
    table_ptr,
    table_stride,
    num_rows,
    fresh_ptr,
    fresh_stride,
    num_fresh,
    num_tokens,
    num_heads,
    kv_programs,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
):
    """Programs [0, kv_programs) take TOKENS rows of KV each, the others HEADS heads of one token."""
    program = tl.program_id(0)
    if program < kv_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        there = token < num_tokens
        x = _load_kv(
            kv_ptr,
            kv_stride,
            norm_ptr,
            eps,
            cos_ptr,
            sin_ptr,
            token,
            there,
            ROW_DIM,
            ROPE,
            TOKENS,
            D,
        )
        x = rounded(x, ROUNDING, KIND, ROW_DIM, ROW_DIM - ROPE, TOKENS, D)
        if KIND != PACKED_FP8 or ROUNDING != FP8_ROUNDING:
            # Rounding twice changes no value. What the table encodes is what fresh holds: two encodings of one value
            # exist (224 x 2s = 448 x s), and a tail store, which sees fresh alone, must choose the same.
            x = stored(x, KIND, ROW_DIM, ROW_DIM - ROPE, TOKENS, D)
        lane = tl.arange(0, D)[None, :]
        place = token.to(tl.int64)[:, None] * fresh_stride + lane
        kept = (token < num_fresh)[:, None] & (lane < ROW_DIM)
        tl.store(fresh_ptr + place, cast(x, fresh_ptr.dtype.element_ty), mask=kept)
        row = tl.load(loc_ptr + token, mask=there, other=-1)
        ok = (row >= 0) & (row < num_rows)
        store_rows(
            table_ptr, table_stride, row, ok, x,
            KIND, ROW_DIM, ROW_DIM - ROPE, PLANE_ROWS, TOKENS, D,
        )  # fmt: skip
    else:
        groups = tl.cdiv(num_heads, HEADS)
        owner = (program - kv_programs) // groups
        head = (program - kv_programs) % groups * HEADS + tl.arange(0, HEADS)
        base = q_ptr + owner.to(tl.int64) * q_token_stride
        known = head < num_heads
        _turn_queries(
            base, q_head_stride, eps, cos_ptr, sin_ptr, owner, head, known, ROW_DIM, ROPE, HEADS, D
        )


@triton.jit
def _load_kv(
    kv_ptr,
    kv_stride,
    norm_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    token,
    there,
    ROW_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
):
    """Normed and rotated KV of TOKENS tokens, fp32."""
    NOPE: tl.constexpr = ROW_DIM - ROPE
    lane = tl.arange(0, D)[None, :]
    place = token.to(tl.int64)[:, None] * kv_stride + lane
    mask = there[:, None] & (lane < ROW_DIM)
    x = to_fp32(tl.load(kv_ptr + place, mask=mask, other=0.0))
    x = x * rms_scale(x, eps, ROW_DIM)
    # Weights and angles are loaded once a row: in tiles of the values' shape they lie where the threads hold the
    # values, and nothing has to move through shared memory.
    x = x * tl.load(norm_ptr + lane + 0 * token[:, None], mask=mask, other=0.0)
    cos, sin, turned = load_rope(cos_ptr, sin_ptr, token, there, NOPE, ROPE, D)
    return rotate(x, cos, sin, turned, TOKENS, D, NOPE % 2)


@triton.jit
def _turn_queries(
    base,
    head_stride,
    eps,
    cos_ptr,
    sin_ptr,
    token,
    head,
    there,
    ROW_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
):
    """Norm and rotate heads of one token in place."""
    NOPE: tl.constexpr = ROW_DIM - ROPE
    lane = tl.arange(0, D)[None, :]
    place = head.to(tl.int64)[:, None] * head_stride + lane
    mask = there[:, None] & (lane < ROW_DIM)
    x = to_fp32(tl.load(base + place, mask=mask, other=0.0))
    x = x * rms_scale(x, eps, ROW_DIM)
    # The same table row for each head, as in _load_kv.
    cos, sin, turned = load_rope(cos_ptr, sin_ptr, head * 0 + token, there, NOPE, ROPE, D)
    x = rotate(x, cos, sin, turned, HEADS, D, NOPE % 2)
    tl.store(base + place, cast(x, base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _store_tail_kernel(
    fresh_ptr,
    fresh_stride,
    loc_ptr,
    table_ptr,
    table_stride,
    num_rows,
    num_tokens,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, D)[None, :]
    row = tl.load(loc_ptr + token, mask=token < num_tokens, other=-1)
    ok = (row >= 0) & (row < num_rows)
    place = token.to(tl.int64)[:, None] * fresh_stride + lane
    x = to_fp32(tl.load(fresh_ptr + place, mask=ok[:, None] & (lane < ROW_DIM), other=0.0))
    store_rows(table_ptr, table_stride, row, ok, x, KIND, ROW_DIM, NOPE, PLANE_ROWS, TOKENS, D)


def variants() -> tuple[KernelVariant, ...]:
    """Head dim 512 with 64 rotated, official rounding: store and tail store of each row format."""
    return tuple(
        variant
        for name, kind, model, table in (
            ("fp32", FP32, "*fp32", "*fp32"),
            ("bf16", BF16, "*bf16", "*bf16"),
            ("packed_fp8", PACKED_FP8, "*bf16", "*u8"),
        )
        for variant in (
            _store_variant(name, kind.value, model, table),
            _tail_variant(name, kind.value, model, table),
        )
    )


def _row_variant(kind: int) -> dict[str, Any]:
    plane_rows = 64 if kind == PACKED_FP8.value else 1
    return {"KIND": kind, "ROW_DIM": 512, "PLANE_ROWS": plane_rows, "TOKENS": KV_TOKENS, "D": 512}


def _store_variant(name: str, kind: int, model: str, table: str) -> KernelVariant:
    pointers = {"q_ptr": model, "kv_ptr": model, "table_ptr": table, "fresh_ptr": model}
    pointers |= {"norm_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "loc_ptr": "*i32"}
    strides = ("q_token_stride", "q_head_stride", "kv_stride", "table_stride", "fresh_stride")
    counts = ("num_rows", "num_fresh", "num_tokens", "num_heads", "kv_programs")
    return KernelVariant(
        name=f"store {name}",
        fn=_store_kernel,
        signature={**pointers, "eps": "fp32", **dict.fromkeys((*strides, *counts), "i32")},
        constexprs={
            "ROUNDING": FP8_ROUNDING.value,
            "ROPE": 64,
            "HEADS": _config(64, 512)["HEADS"],
            **_row_variant(kind),
        },
        num_warps=NUM_WARPS,
        aligned=(*pointers, *strides),
    )


def _tail_variant(name: str, kind: int, model: str, table: str) -> KernelVariant:
    pointers = {"fresh_ptr": model, "loc_ptr": "*i32", "table_ptr": table}
    strides = ("fresh_stride", "table_stride")
    return KernelVariant(
        name=f"store_tail {name}",
        fn=_store_tail_kernel,
        signature={
            **pointers,
            **dict.fromkeys((*strides, "num_rows", "num_tokens"), "i32"),
        },
        constexprs={"NOPE": 448 if kind == PACKED_FP8.value else 512, **_row_variant(kind)},
        num_warps=NUM_WARPS,
        aligned=(*pointers, *strides),
    )
