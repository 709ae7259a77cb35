"""Indexer scores over paged keys: sum_h w_h relu(q_h . key) in one launch (spec/architecture.md 3.7).

Legend: T tokens, H index heads, D index dim, N entries, P half the rope width.

A program takes one chunk of one token's entries, or of two or four neighbouring tokens that share their keys. Keys are
the M side of the product and heads its N side, so that the sum over heads stays inside a thread but for two shuffles.
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
from dsv4.kernels.rows_triton import BF16, INDEX_FP4, INDEX_FP8, PACKED_FP8, RowArgs, row_args
from dsv4.kernels.score_keys_triton import key_pages, keys_exist, load_keys, load_scales, operand
from dsv4.kernels.tile_triton import cast, decode_e4m3
from dsv4.metadata.plans import RopeTable, ScoreInputs
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp8Rows
from dsv4.triton_launch import KernelVariant, dot_dtype, next_pow2, supports_native_fp8

MIN_HEADS = 16
MIN_CHANNELS = 32
"""Smallest sides of an fp8 product on every target."""
VECTOR_BYTES = 16
"""Widest load of a thread."""
MAX_HEADS = 64
"""Heads of one product; more heads take several."""
MOST_TOKENS = 4
"""Of a program."""


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
        x = operand(x, DOT)
    weights_place = token.to(tl.int64) * weights_token + head
    return x, tl.load(weights_ptr + weights_place, mask=ok, other=0.0)


@triton.jit
def _sums(
    dots, weights,
    FINITE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """[N, TOKENS]: each token's sum over its heads, of products [N, TOKENS * BLOCK_H]."""
    if FINITE:
        # Twice the clipped product, exact: additions run at twice the speed of maxima. It pays where sums limit.
        dots = (dots + tl.abs(dots)) * (weights * 0.5)[None, :]
    else:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    if TOKENS == 1:
        sums = tl.sum(dots, 1)[:, None]
    else:
        sums = tl.sum(tl.reshape(dots, [N, TOKENS, BLOCK_H]), 2)
    return sums


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "num_rows", "max_entries", "chunk", "out_stride",
    ]
)  # fmt: skip
def _score_kernel(
    q_ptr, weights_ptr, keys_ptr, table_ptr, slot_ptr, visible_ptr, out_ptr,
    first_token, num_tokens, num_rows, max_entries, chunk, num_pages,
    q_token, q_head, weights_token, stride, table_stride, out_stride,
    KIND: tl.constexpr, CODES: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, RUNS: tl.constexpr, RPP: tl.constexpr, BASE: tl.constexpr,
    PLANE_ROWS: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr, TOKENS: tl.constexpr,
    PRODUCTS: tl.constexpr, BLOCK_H: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Entries [chunk * program 1, + chunk) of the TOKENS tokens from TOKENS * program 0 on."""
    first = tl.program_id(0) * TOKENS
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, max_entries)
    own = tl.arange(0, TOKENS)
    there = first + own < num_tokens
    # Loads that need no other go out together: a program's first key waits for slot and page in turn as it is.
    slots = tl.load(slot_ptr + first_token + first + own, mask=there, other=-1)
    visible = tl.load(visible_ptr + first_token + first + own, mask=there, other=0)
    SHARE: tl.constexpr = TOKENS // PRODUCTS
    q, weights = _queries(
        q_ptr, weights_ptr, first, num_tokens, q_token, q_head, weights_token, 0,
        CODES, NATIVE, DOT, HEADS, DIM, SHARE, BLOCK_H, D,
    )  # fmt: skip
    if PRODUCTS == 2:
        second_q, second_weights = _queries(
            q_ptr, weights_ptr, first + SHARE, num_tokens, q_token, q_head, weights_token, 0,
            CODES, NATIVE, DOT, HEADS, DIM, SHARE, BLOCK_H, D,
        )  # fmt: skip
    # An empty table has no row 0 to read.
    visible = tl.minimum(visible, tl.where(num_rows > 0, end, 0))
    visible = tl.where(slots >= 0, visible, 0)
    out_rows = out_ptr + (first + own).to(tl.int64)[None, :] * out_stride
    done = tl.zeros([TOKENS], tl.int32) + begin
    if tl.max(visible, 0) > begin:
        # Neighbours of one slot share its keys; a token of another slot takes a turn of its own.
        for turn in range(0, TOKENS):
            slot = tl.max(tl.where(own == turn, slots, -1), 0)
            ours = (slots == slot) & (slots >= 0)
            taken = tl.max(tl.where(ours & (own < turn), 1, 0), 0)
            seen = tl.where(ours & (taken == 0), visible, 0)
            count = tl.cdiv(tl.maximum(tl.max(seen, 0) - begin, 0), N)
            table = table_ptr + tl.maximum(slot, 0).to(tl.int64) * table_stride
            page, last = key_pages(table, begin, num_pages, RUNS, RPP, N)
            scale = tl.full([N], 1.0, tl.float32)
            if NATIVE:
                scale = load_scales(
                    keys_ptr, page, last, begin, num_rows, stride, DIM,
                    RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N,
                )  # fmt: skip
            for tile in range(0, count):
                start = begin + tile * N
                keys = load_keys(
                    keys_ptr, page, last, start, num_rows, stride, KIND, NATIVE, DOT, DIM,
                    RUNS, RPP, BASE, PLANE_ROWS, WHOLE, ALIGN, N, D,
                )  # fmt: skip
                ok = keys_exist(page, last, start, num_rows, RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N)
                # Pages and scales come a tile ahead: keys wait for their page, and scores should not wait for a scale.
                page, last = key_pages(table, start + N, num_pages, RUNS, RPP, N)
                next_scale = scale
                if NATIVE:
                    next_scale = load_scales(
                        keys_ptr, page, last, start + N, num_rows, stride, DIM,
                        RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N,
                    )  # fmt: skip
                dots = tl.dot(keys, tl.trans(q), input_precision="ieee")
                if PRODUCTS == 2:
                    # Issued before the first product's sums: they run beside it.
                    second = tl.dot(keys, tl.trans(second_q), input_precision="ieee")
                    halves = tl.join(
                        _sums(dots, weights, NATIVE, SHARE, BLOCK_H, N),
                        _sums(second, second_weights, NATIVE, SHARE, BLOCK_H, N),
                    )
                    scores = tl.reshape(tl.permute(halves, (0, 2, 1)), [N, TOKENS])
                else:
                    scores = _sums(dots, weights, False, TOKENS, BLOCK_H, N)
                for block in tl.static_range(1, (HEADS + BLOCK_H - 1) // BLOCK_H):
                    more_q, more_weights = _queries(
                        q_ptr, weights_ptr, first, num_tokens, q_token, q_head, weights_token,
                        block * BLOCK_H, CODES, NATIVE, DOT, HEADS, DIM, TOKENS, BLOCK_H, D,
                    )  # fmt: skip
                    dots = tl.dot(keys, tl.trans(more_q), input_precision="ieee")
                    scores += _sums(dots, more_weights, False, TOKENS, BLOCK_H, N)
                entry = start + tl.arange(0, N)[:, None]
                hit = ok[:, None] & (entry < seen[None, :])
                scores = tl.where(hit, scores * scale[:, None], -float("inf"))
                tl.store(out_rows + entry, scores, mask=(entry < end) & (seen > 0)[None, :])
                scale = next_scale
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
    products: int = 1
    """Of a tile, 1 or 2: each of its share of the tokens."""
    block_n: int
    """Keys of one product."""
    num_warps: int
    num_stages: int
    resident: int
    """Programs that one SM holds at a time, by registers and shared memory."""
    tiles: tuple[int, int]
    """Lengths of a chunk to choose from where there is more than one wave of programs, the longer one first."""


ONE_WAVE = 4
"""Programs an SM that saturate its memory: while chunks are short, there are no more programs than that."""
SHORT, MIDDLE, LONG = (16, 12), (32, 24), (512, 128)
"""Tiles of a chunk: for one token, a few in a row, prompts. In decode, capacities may be many times the lengths, and
short chunks spread what there is. Prompts take long ones: its queries cost a program several tiles' time."""


def _config(*, heads: int, native: bool, wide: bool, run: int, hip: bool) -> Config:
    """`wide`: fp32 products; `run`: tokens of a slot in a row.

    Measured on an H200 with 64 heads and fp8 keys, tiles of 64 and 128 keys, 2 to 6 stages, 4 and 8 warps: 64 keys in 3
    stages are the fastest for one token, as six programs fit an SM (1 x 262,144 keys: 12.9 us, and 18.7 with 128 keys
    in 4 stages). Two tokens a program win from 2 tokens a request on and four from 4 on (64 requests of 2: 117, 102,
    166 us for one, two, four tokens a program; 32 requests of 4: 110, 95, 87 us). Two products of two tokens take 3 %
    less time than one of four: sums of the first run beside the second.
    """
    if wide:
        # fp32 products run outside the tensor cores and keep their operands in registers.
        return Config(tokens=1, block_n=32, num_warps=8, num_stages=1, resident=2, tiles=SHORT)
    # More heads take several products, whose queries and weights leave no room for a second token's.
    tokens = min(run, MOST_TOKENS if native else 2) if heads <= MAX_HEADS else 1
    tokens = 2 if tokens == 3 else tokens
    if native:
        resident, stages = {1: 6, 2: 3, 4: 2}[tokens], 3
    else:
        # Keys of 256 bytes. On AMD 64 KiB in all hold the queries and one tile.
        resident, stages = 4 // tokens, 2 if hip or tokens == 1 else 4
    tiles = SHORT if tokens == 1 else MIDDLE if run < MOST_TOKENS else LONG
    return Config(
        tokens=tokens, products=2 if tokens == MOST_TOKENS else 1, block_n=64, num_warps=4, num_stages=stages,
        resident=resident, tiles=tiles,
    )  # fmt: skip


def _chunk(num_groups: int, max_entries: int, config: Config, num_sms: int) -> int:
    """Entries of a program: from capacities alone, and whole tiles, so that tiles never move."""
    tiles = -(-max_entries // config.block_n)
    places = num_sms * min(config.resident, ONE_WAVE)
    each = -(-tiles // max(places // num_groups, 1))

    def fill(each: int) -> float:
        """Share of the waves of programs that has work: a short last wave leaves the memory idle."""
        waves = num_groups * -(-tiles // each) / (num_sms * config.resident)
        return waves / math.ceil(waves)

    if each > min(config.tiles):
        each = max(config.tiles, key=fill)
    chunks = -(-tiles // each)
    return -(-tiles // chunks) * config.block_n


def _layout(
    args: RowArgs, *, block_n: int, rows_per_page: int, base: int, size: int
) -> dict[str, Any]:
    """How tiles of `block_n` keys fall on a table whose elements have `size` bytes: compile-time arguments."""
    planar = args.kind >= PACKED_FP8.value
    apart = math.gcd(rows_per_page, base, args.num_rows, args.plane_rows if planar else 0)
    runs = next((n for n in (1, 2) if apart % (block_n // n) == 0), 0)
    # Plain rows step by the stride alone, the keys of a plane by their width too.
    step = math.gcd(args.stride * size, args.row_dim * size if planar else 0)
    return {
        "DIM": args.row_dim, "RUNS": runs, "RPP": rows_per_page, "BASE": base, "PLANE_ROWS": args.plane_rows,
        "WHOLE": planar and base == 0 and args.plane_rows == rows_per_page and args.num_rows % rows_per_page == 0,
        "ALIGN": max(math.gcd(step, VECTOR_BYTES) // size, 1), "D": max(next_pow2(args.row_dim), MIN_CHANNELS),
    }  # fmt: skip


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
        args, table = row_args(inputs.view), inputs.keys.block_table
        config, constexprs = self._plan(q_THD, inputs, args)
        groups = -(-num_tokens // config.tokens)
        chunk = _chunk(groups, num_entries, config, _num_sms(q_THD.device))
        _score_kernel[(groups, -(-num_entries // chunk))](
            q_THD.view(torch.uint8) if constexprs["CODES"] else q_THD, weights_TH, args.storage,
            table, inputs.slot_T, inputs.num_visible_T, out_TN,
            first_token, num_tokens, args.num_rows, num_entries, chunk, table.shape[1],
            q_THD.stride(0), q_THD.stride(1), weights_TH.stride(0), args.stride, table.stride(0),
            out_TN.stride(0),
            **constexprs, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def _plan(
        self, q_THD: Tensor, inputs: ScoreInputs, args: RowArgs
    ) -> tuple[Config, dict[str, Any]]:
        codes = q_THD.element_size() == 1
        native = (
            codes
            and args.kind == INDEX_FP8.value
            and args.plane_rows * args.row_dim % 4 == 0  # scales lie at whole words
            and supports_native_fp8(q_THD.device)
        )
        wide = tl.float32 in (dot_dtype(q_THD), dot_dtype(args.storage))
        config = _config(
            heads=q_THD.shape[1], native=native, wide=wide, run=self._run(inputs),
            hip=torch.version.hip is not None,
        )  # fmt: skip
        layout = _layout(
            args,
            block_n=config.block_n,
            rows_per_page=inputs.keys.rows_per_page,
            base=inputs.keys.base,
            size=args.storage.element_size(),
        )
        return config, layout | _product(
            config, args.kind, heads=q_THD.shape[1], codes=codes, native=native, wide=wide
        )

    def _run(self, inputs: ScoreInputs) -> int:
        """How many neighbouring tokens may be of one slot; a deterministic sum never has company."""
        tokens, requests = inputs.slot_T.shape[0], inputs.request_slots_B.shape[0]
        return 1 if self._deterministic else max(-(-tokens // max(requests, 1)), 1)


def _product(
    config: Config, kind: int, *, heads: int, codes: bool, native: bool, wide: bool
) -> dict[str, Any]:
    """Compile-time arguments of the products."""
    return {
        "KIND": kind, "CODES": codes, "NATIVE": native, "DOT": tl.float32 if wide else tl.bfloat16,
        "HEADS": heads, "BLOCK_H": min(max(next_pow2(heads), MIN_HEADS), MAX_HEADS),
        "TOKENS": config.tokens, "PRODUCTS": config.products, "N": config.block_n,
    }  # fmt: skip


def variants() -> tuple[KernelVariant, ...]:
    """The published indexer: 64 heads of 128 channels over pages of 64 keys, one to four tokens a program."""
    nvidia, amd = ("sm_90", "sm_100"), ("gfx942", "gfx950")
    cases: list[tuple[Any, bool, int, tuple[str, ...]]]
    cases = [(INDEX_FP8, True, run, nvidia) for run in (1, 2, 4)]
    cases += [(INDEX_FP8, False, run, amd) for run in (1, 2)]
    for kind in (BF16, INDEX_FP4):
        cases += [(kind, False, 1, nvidia + amd), (kind, False, 2, nvidia), (kind, False, 2, amd)]
    return query_variants() + tuple(
        _variant(kind.value, native, run, targets) for kind, native, run, targets in cases
    )


def _variant(kind: int, native: bool, run: int, targets: tuple[str, ...]) -> KernelVariant:
    config = _config(heads=64, native=native, wide=False, run=run, hip=targets[0] == "gfx942")
    name, stride, plane_rows = {
        BF16.value: ("bf16", 128, 1),
        INDEX_FP8.value: ("fp8", 64 * 132, 64),
        INDEX_FP4.value: ("fp4", 64 * 68, 64),
    }[kind]
    planar = plane_rows > 1
    storage = torch.empty(0, dtype=torch.uint8 if planar else torch.bfloat16)
    args = RowArgs(storage, stride, 64 * 64, kind, 128, 128, plane_rows)
    codes = name == "fp8"
    pointers = {
        "q_ptr": "*u8" if codes else "*bf16", "weights_ptr": "*fp32",
        "keys_ptr": "*u8" if planar else "*bf16",
        "table_ptr": "*i32", "slot_ptr": "*i32", "visible_ptr": "*i32", "out_ptr": "*fp32",
    }  # fmt: skip
    strides = ("q_token", "q_head", "weights_token", "stride", "table_stride")
    sizes = ("first_token", "num_tokens", "num_rows", "max_entries", "chunk", "num_pages", "out_stride")  # fmt: skip
    return KernelVariant(
        name=f"score-{name}-{config.tokens}",
        fn=_score_kernel,
        signature=pointers | dict.fromkeys(strides + sizes, "i32"),
        constexprs=_layout(
            args, block_n=config.block_n, rows_per_page=64, base=0, size=storage.element_size()
        )
        | _product(config, kind, heads=64, codes=codes, native=native, wide=False),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, *strides),
        targets=targets,
    )
