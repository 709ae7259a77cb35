"""Indexer scores over paged keys: sum_h w_h relu(q_h . key) in one launch (spec/architecture.md 3.7).

Legend: T tokens, H index heads, D index dim, N entries, P half the rope width.

A program takes one chunk of one token's entries, or of two neighbouring tokens that share their keys. Keys are the M
side of the product and heads its N side, so that the sum over heads stays inside a thread but for two shuffles.
A score depends on its own query and key alone: NaNs in keys that nobody sees stay in lanes that are masked at the end.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import Rounding, ScoreKernel
from dsv4.kernels.queries_triton import prepare_queries, query_variants
from dsv4.kernels.rows_triton import (
    BF16,
    INDEX_FP4,
    INDEX_FP8,
    PACKED_FP8,
    RowArgs,
    load_rows,
    row_args,
)
from dsv4.kernels.tile_triton import cast, decode_e4m3, to_fp32
from dsv4.kernels.triton_launch import (
    KernelVariant,
    dot_dtype,
    next_pow2,
    supports_native_fp8,
)
from dsv4.metadata.plans import RopeTable, ScoreInputs
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp8Rows

MIN_DOT = 16
"""Smallest side of a product on every target."""
MAX_HEADS = 64
"""Heads of one product; more heads take several."""


@triton.jit
def _pages(table_ptr, start, num_pages, RUNS: tl.constexpr, RPP: tl.constexpr, N: tl.constexpr):
    """Pages of the keys [start, start + N): of their first and last run of neighbours, or (RUNS 0) of each key."""
    if RUNS == 0:
        index = (start + tl.arange(0, N)) // RPP
        page = tl.load(table_ptr + index, mask=index < num_pages, other=-1)
        return page, start
    index = start // RPP
    page = tl.load(table_ptr + index, mask=index < num_pages, other=-1)
    second = page
    if RUNS == 2:
        index = (start + N // 2) // RPP
        second = tl.load(table_ptr + index, mask=index < num_pages, other=-1)
    return page, second


@triton.jit
def _row(page, entry, num_rows, base, RPP: tl.constexpr):
    """(row, whether there is one); row 0 where not."""
    row = base + page.to(tl.int64) * RPP + entry % RPP
    ok = (page >= 0) & (row >= 0) & (row < num_rows)
    return tl.where(ok, row, 0).to(tl.int32), ok


@triton.jit
def _rows(
    page, second, start, num_rows, base, RUNS: tl.constexpr, RPP: tl.constexpr, N: tl.constexpr
):
    """Rows [N] of the keys [start, start + N), and whether there is one."""
    lane = tl.arange(0, N)
    if RUNS > 0:
        page = tl.where(lane < N // RUNS, page, second)
    return _row(page, start + lane, num_rows, base, RPP)


@triton.jit
def _place(row, stride, DATA: tl.constexpr, PLANE_ROWS: tl.constexpr):
    """Elements from the table's start to a row, and to its fp32 scale (in bytes; planar rows only)."""
    if DATA == 0:
        data = row.to(tl.int64) * stride
        scale = data
    else:
        plane = row // PLANE_ROWS
        slot = row - plane * PLANE_ROWS
        start = plane.to(tl.int64) * stride
        data = start + slot * DATA
        scale = start + PLANE_ROWS * DATA + slot * 4
    return data, scale


@triton.jit
def _places(
    page, second, start, num_rows, base, stride,
    RUNS: tl.constexpr, RPP: tl.constexpr, DATA: tl.constexpr, PLANE_ROWS: tl.constexpr,
    ALIGN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`_place` [N] of the keys [start, start + N): of each by itself, or each run's first plus its steps."""
    if RUNS == 0:
        row, _ = _row(page, start + tl.arange(0, N), num_rows, base, RPP)
        data, scale = _place(row, stride, DATA, PLANE_ROWS)
    else:
        SPAN: tl.constexpr = N // RUNS
        row, _ = _row(page, start, num_rows, base, RPP)
        other, _ = _row(second, start + (N - SPAN), num_rows, base, RPP)
        data, scale = _place(row, stride, DATA, PLANE_ROWS)
        other_data, other_scale = _place(other, stride, DATA, PLANE_ROWS)
        lane = tl.arange(0, N)
        front = lane < SPAN
        step = DATA if DATA else stride
        data = tl.where(front, data, other_data) + lane % SPAN * step
        scale = tl.where(front, scale, other_scale) + lane % SPAN * 4
    if ALIGN > 1:
        data = tl.multiple_of(data, ALIGN)
    return data, scale


@triton.jit
def _operand(x, DOT: tl.constexpr):
    """A loaded tile as a product takes it; untouched where it may be, so that copies need not pass the registers."""
    if x.dtype != DOT:
        x = cast(to_fp32(x), DOT)
    return x


@triton.jit
def _keys(
    keys_ptr, page, second, start, num_rows, base, stride,
    KIND: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr, RUNS: tl.constexpr, RPP: tl.constexpr,
    DIM: tl.constexpr, PLANE_ROWS: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys [N, D] as the product takes them, and what multiplies their scores [N]."""
    scale = tl.full([N], 1.0, tl.float32)
    if NATIVE or KIND < PACKED_FP8:
        data, scale_place = _places(
            page, second, start, num_rows, base, stride,
            RUNS, RPP, DIM if NATIVE else 0, PLANE_ROWS, ALIGN, N,
        )  # fmt: skip
        lane = tl.arange(0, D)[None, :]
        typed = keys_ptr.to(tl.pointer_type(tl.float8e4nv)) if NATIVE else keys_ptr
        # A key that is none reads row 0 instead: only the channels need a mask, and only if some are missing.
        if DIM == D:
            x = tl.load(typed + data[:, None] + lane)
        else:
            x = tl.load(typed + data[:, None] + lane, mask=lane < DIM, other=0.0)
        if NATIVE:
            scale = tl.load((keys_ptr + scale_place).to(tl.pointer_type(tl.float32)))
        else:
            x = _operand(x, DOT)
    else:
        row, ok = _rows(page, second, start, num_rows, base, RUNS, RPP, N)
        x = load_rows(keys_ptr, stride, row, ok, KIND, DIM, DIM, PLANE_ROWS, N, D)
        x = cast(x, DOT)
    return x, scale


@triton.jit
def _queries(
    q_ptr, weights_ptr, first, num_tokens, q_token, q_head, weights_token, first_head,
    CODES: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Queries [TOKENS * BLOCK_H, D] and weights of the tokens from `first` on, zero where there is none."""
    column = tl.arange(0, TOKENS * BLOCK_H)
    token = first + column // BLOCK_H
    head = first_head + column % BLOCK_H
    ok = (token < num_tokens) & (head < HEADS)
    place = token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
    lane = tl.arange(0, D)
    typed = q_ptr.to(tl.pointer_type(tl.float8e4nv)) if NATIVE else q_ptr
    mask = ok[:, None] & (lane < DIM)[None, :]
    if NATIVE:
        x = tl.load(typed + place[:, None] + lane[None, :], mask=mask, other=0.0)
    elif CODES:
        x = tl.load(typed + place[:, None] + lane[None, :], mask=mask, other=0)
        x = cast(decode_e4m3(x.to(tl.int32)), DOT)
    else:
        x = tl.load(typed + place[:, None] + lane[None, :], mask=mask, other=0.0)
        x = _operand(x, DOT)
    weights_place = token.to(tl.int64) * weights_token + head
    return x, tl.load(weights_ptr + weights_place, mask=ok, other=0.0)


@triton.jit
def _sums(keys, q, weights, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, N: tl.constexpr):
    """[N, TOKENS]: each token's sum over its heads."""
    dots = tl.dot(keys, tl.trans(q), input_precision="ieee")
    dots = tl.maximum(dots, 0.0) * weights[None, :]
    if TOKENS == 1:
        return tl.sum(dots, 1)[:, None]
    return tl.sum(tl.reshape(dots, [N, TOKENS, BLOCK_H]), 2)


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "num_rows", "max_entries", "chunk", "out_stride",
    ]
)  # fmt: skip
def _score_kernel(
    q_ptr, weights_ptr, keys_ptr, table_ptr, slot_ptr, visible_ptr, out_ptr,
    first_token, num_tokens, num_rows, max_entries, chunk, num_pages, base,
    q_token, q_head, weights_token, stride, table_stride, out_stride,
    KIND: tl.constexpr, CODES: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, RPP: tl.constexpr, PLANE_ROWS: tl.constexpr,
    RUNS: tl.constexpr, ALIGN: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Entries [chunk * program 1, + chunk) of the TOKENS tokens from TOKENS * program 0 on."""
    first = tl.program_id(0) * TOKENS
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, max_entries)
    own = tl.arange(0, TOKENS)
    there = first + own < num_tokens
    slots = tl.load(slot_ptr + first_token + first + own, mask=there, other=-1)
    visible = tl.load(visible_ptr + first_token + first + own, mask=there & (slots >= 0), other=0)
    # An empty table has no row 0 to read.
    visible = tl.minimum(visible, tl.where(num_rows > 0, end, 0))
    out_rows = out_ptr + (first + own).to(tl.int64)[None, :] * out_stride
    done = tl.zeros([TOKENS], tl.int32) + begin
    if tl.max(visible, 0) > begin:
        q, weights = _queries(
            q_ptr, weights_ptr, first, num_tokens, q_token, q_head, weights_token, 0,
            CODES, NATIVE, DOT, HEADS, DIM, TOKENS, BLOCK_H, D,
        )  # fmt: skip
        # Neighbours of one slot share its keys; a token of another slot takes a turn of its own.
        for turn in range(0, TOKENS):
            slot = tl.max(tl.where(own == turn, slots, -1), 0)
            ours = (slots == slot) & (slots >= 0)
            taken = tl.max(tl.where(ours & (own < turn), 1, 0), 0)
            seen = tl.where(ours & (taken == 0), visible, 0)
            count = tl.cdiv(tl.maximum(tl.max(seen, 0) - begin, 0), N)
            table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * table_stride
            page, second = _pages(table, begin, num_pages, RUNS, RPP, N)
            for tile in range(0, count):
                start = begin + tile * N
                keys, scale = _keys(
                    keys_ptr, page, second, start, num_rows, base, stride,
                    KIND, NATIVE, DOT, RUNS, RPP, DIM, PLANE_ROWS, ALIGN, N, D,
                )  # fmt: skip
                _, ok = _rows(page, second, start, num_rows, base, RUNS, RPP, N)
                # Fetched a tile ahead: the address of a key waits for its page.
                page, second = _pages(table, start + N, num_pages, RUNS, RPP, N)
                scores = _sums(keys, q, weights, TOKENS, BLOCK_H, N)
                for block in tl.static_range(1, (HEADS + BLOCK_H - 1) // BLOCK_H):
                    more_q, more_weights = _queries(
                        q_ptr, weights_ptr, first, num_tokens, q_token, q_head, weights_token,
                        block * BLOCK_H, CODES, NATIVE, DOT, HEADS, DIM, TOKENS, BLOCK_H, D,
                    )  # fmt: skip
                    scores += _sums(keys, more_q, more_weights, TOKENS, BLOCK_H, N)
                entry = start + tl.arange(0, N)[:, None]
                hit = ok[:, None] & (entry < seen[None, :])
                scores = tl.where(hit, scores * scale[:, None], -float("inf"))
                tl.store(out_rows + entry, scores, mask=(entry < end) & (seen > 0)[None, :])
            done = tl.where(seen > 0, begin + count * N, done)
    empty = tl.full([4 * N, TOKENS], -float("inf"), tl.float32)
    for start in range(tl.min(done, 0), end, 4 * N):
        entry = start + tl.arange(0, 4 * N)[:, None]
        tl.store(
            out_rows + entry, empty, mask=(entry >= done[None, :]) & (entry < end) & there[None, :]
        )


@frozen(kw_only=True)
class Config:
    """What a launch may be tuned by."""

    tokens: int
    """Neighbouring tokens of a program; they share the keys of their slot."""
    block_n: int
    """Keys of one product."""
    num_warps: int
    num_stages: int


CHUNKS_PER_SM = 16
"""Programs to aim at: ragged lengths leave some of them without work."""
RESIDENT = 4
"""Programs that one SM holds at a time (key stages of shared memory); fewer than a full wave gain nothing."""
LONG_RUN = 4
"""Key tiles that pay for a program's start: its query, its first page and the first key wait for each other."""
MOST_TILES = 64
"""Longest chunk: long programs leave the chip empty at the end."""


def _config(*, kind: int, native: bool, wide: bool, shared: bool, hip: bool) -> Config:
    """`wide`: fp32 products; `shared`: neighbouring tokens may be of one slot."""
    tokens = 2 if shared else 1
    if wide:
        # fp32 products run outside the tensor cores and keep their operands in registers.
        return Config(tokens=tokens, block_n=32, num_warps=4, num_stages=1)
    if native:
        return Config(tokens=tokens, block_n=128, num_warps=4, num_stages=4)
    if hip:
        # 64 KiB of shared memory hold the query and one tile of keys.
        return Config(tokens=tokens, block_n=64, num_warps=4, num_stages=2)
    return Config(tokens=tokens, block_n=128, num_warps=4 * tokens, num_stages=3)


def _chunk(num_groups: int, max_entries: int, block_n: int, num_sms: int) -> int:
    """Entries of a program: from capacities alone, and a multiple of block_n, so that tiles never move."""
    tiles = -(-max_entries // block_n)
    total = num_groups * tiles
    wave = -(-total // (num_sms * RESIDENT))
    each = max(-(-total // (num_sms * CHUNKS_PER_SM)), min(LONG_RUN, wave))
    chunks = -(-tiles // min(each, MOST_TILES))
    return -(-tiles // chunks) * block_n


def _runs(block_n: int, inputs: ScoreInputs, plane_rows: int) -> int:
    """Into how many runs of neighbouring rows a tile of keys falls: 1, 2, or 0 = more."""
    plane = plane_rows if plane_rows > 1 else 0
    apart = math.gcd(inputs.keys.rows_per_page, inputs.keys.base, inputs.view.num_rows, plane)
    for runs in (1, 2):
        if apart % (block_n // runs) == 0:
            return runs
    return 0


def _align(args: RowArgs, native: bool) -> int:
    """Elements by which every key's place is divisible."""
    size = args.storage.element_size()
    steps = (args.stride * size, args.row_dim if native else 0)
    return math.gcd(16, *steps) // size or 1


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class TritonScore(ScoreKernel):
    """Keys of any format; fp8 keys meet fp8 queries in native fp8 products where the GPU has them."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def queries(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        *,
        rope: RopeTable,
        rounding: Rounding,
        scale: float,
        view: KVView,
    ) -> tuple[Tensor, Tensor]:
        codes = isinstance(view.format, IndexFp8Rows)
        return prepare_queries(
            q_THD, weights_TH, rope=rope, rounding=rounding, scale=scale, codes=codes
        )

    def score(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        inputs: ScoreInputs,
        *,
        first_token: int,
        out_TN: Tensor,
    ) -> None:
        num_tokens, num_entries = q_THD.shape[0], inputs.max_entries
        if num_tokens == 0 or num_entries == 0:
            return
        args = row_args(inputs.view)
        constexprs, config = self._plan(q_THD, inputs, args)
        groups = -(-num_tokens // config.tokens)
        chunk = _chunk(groups, num_entries, config.block_n, _num_sms(q_THD.device))
        if constexprs["CODES"]:
            q_THD = q_THD.view(torch.uint8)
        table = inputs.keys.block_table
        _score_kernel[(groups, -(-num_entries // chunk))](
            q_THD, weights_TH, args.storage, table, inputs.slot_T, inputs.num_visible_T, out_TN,
            first_token, num_tokens, args.num_rows, num_entries, chunk, table.shape[1], inputs.keys.base,
            q_THD.stride(0), q_THD.stride(1), weights_TH.stride(0), args.stride, table.stride(0),
            out_TN.stride(0),
            **constexprs, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def _plan(
        self, q_THD: Tensor, inputs: ScoreInputs, args: RowArgs
    ) -> tuple[dict[str, Any], Config]:
        codes = q_THD.element_size() == 1
        native = (
            codes
            and args.kind == INDEX_FP8.value
            and args.plane_rows * args.row_dim % 4 == 0
            and supports_native_fp8(q_THD.device)
        )
        wide = tl.float32 in (dot_dtype(q_THD), dot_dtype(args.storage))
        num_requests = inputs.request_slots_B.shape[0]
        config = _config(
            kind=args.kind,
            native=native,
            wide=wide,
            shared=not self._deterministic and inputs.slot_T.shape[0] > num_requests,
            hip=torch.version.hip is not None,
        )
        return constexprs_of(
            config, kind=args.kind, codes=codes, native=native, wide=wide, heads=q_THD.shape[1], dim=args.row_dim,
            rows_per_page=inputs.keys.rows_per_page, plane_rows=args.plane_rows,
            runs=_runs(config.block_n, inputs, args.plane_rows), align=_align(args, native),
        ), config  # fmt: skip


def constexprs_of(
    config: Config,
    *,
    kind: int,
    codes: bool,
    native: bool,
    wide: bool,
    heads: int,
    dim: int,
    rows_per_page: int,
    plane_rows: int,
    runs: int,
    align: int,
) -> dict[str, Any]:
    """Compile-time arguments of `_score_kernel`."""
    # Two tokens of many heads would not leave room for their products in registers.
    return {
        "KIND": kind, "CODES": codes, "NATIVE": native, "DOT": tl.float32 if wide else tl.bfloat16,
        "HEADS": heads, "DIM": dim, "RPP": rows_per_page, "PLANE_ROWS": plane_rows,
        "RUNS": runs, "ALIGN": align, "TOKENS": config.tokens,
        "BLOCK_H": min(max(next_pow2(heads), MIN_DOT), MAX_HEADS), "N": config.block_n,
        "D": max(next_pow2(dim), 32),
    }  # fmt: skip


def variants() -> tuple[KernelVariant, ...]:
    """The published indexer: 64 heads of 128 channels over pages of 64 keys, one or two tokens a program."""
    nvidia, amd = ("sm_90", "sm_100"), ("gfx942", "gfx950")
    cases = [
        (INDEX_FP8, True, nvidia), (INDEX_FP8, False, amd), (BF16, False, nvidia), (BF16, False, amd),
        (INDEX_FP4, False, nvidia), (INDEX_FP4, False, amd),
    ]  # fmt: skip
    return query_variants() + tuple(
        _variant(kind.value, native, shared, targets)
        for kind, native, targets in cases
        for shared in (False, True)
    )


def _variant(kind: int, native: bool, shared: bool, targets: tuple[str, ...]) -> KernelVariant:
    config = _config(kind=kind, native=native, wide=False, shared=shared, hip="gfx942" in targets)
    planar = kind >= PACKED_FP8.value
    constexprs = constexprs_of(
        config, kind=kind, codes=kind == INDEX_FP8.value, native=native, wide=False, heads=64, dim=128,
        rows_per_page=64, plane_rows=64 if planar else 1, runs=max(config.block_n // 64, 1),
        align=16 if planar else 8,
    )  # fmt: skip
    pointers = {
        "q_ptr": "*u8" if constexprs["CODES"] else "*bf16", "weights_ptr": "*fp32",
        "keys_ptr": "*u8" if planar else "*bf16", "table_ptr": "*i32", "slot_ptr": "*i32",
        "visible_ptr": "*i32", "out_ptr": "*fp32",
    }  # fmt: skip
    strides = ("q_token", "q_head", "weights_token", "stride", "table_stride")
    sizes = (
        "first_token", "num_tokens", "num_rows", "max_entries", "chunk", "num_pages", "base", "out_stride",
    )  # fmt: skip
    name = {INDEX_FP8.value: "fp8", INDEX_FP4.value: "fp4"}.get(kind, "bf16")
    return KernelVariant(
        name=f"score-{name}-{config.tokens}",
        fn=_score_kernel,
        signature=pointers | dict.fromkeys(strides + sizes, "i32"),
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, *strides),
        targets=targets,
    )
