"""Attend in Triton: gathered rows of one or two sources in one softmax, a token's rows split where tokens are few.

One program takes M heads of a token and walks over tiles of N rows. Legend: T tokens, H heads, D head dim, P half the
rope width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.attend_tiles_triton import (
    FRESH_BY_ADDRESS,
    FRESH_BY_LOAD,
    LOG2_E,
    NO_FRESH,
    finish,
    fold_tile,
    is_row,
    load_packed,
    load_plain,
    mass_shape,
    operand,
    rope_back,
    tile_indices,
    tile_of,
)
from dsv4.kernels.base import AttentionKernel
from dsv4.kernels.combine_triton import combine_parts, lse_args, rope_args, rope_width
from dsv4.kernels.rows_triton import FP32, PACKED_FP8, RowArgs, row_args
from dsv4.kernels.tile_triton import cast
from dsv4.kernels.triton_launch import (
    KernelVariant,
    dot_dtype,
    interpreting,
    next_pow2,
    supports_native_fp8,
)
from dsv4.metadata.buffers import MAX_SPLITS
from dsv4.metadata.plans import RopeTable, Source, Workspace


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
    PARTS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr, DOT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    STAGES: tl.constexpr, EAGER: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """M heads of one token over all of its tiles, or with PARTS over one of equal shares of them.

    NOPE: channels of a packed row that are codes; ROPE: channels that are rotated back, 0 = none.
    """
    if PDL:
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
                again = tile_indices(tile, lists, SOURCES, N)
                k = tile_of(
                    raw, segment, again, KIND, FAST, NATIVE, FRESH,
                    ROW_DIM, NOPE, PLANE_ROWS, DOT, N, D,
                )  # fmt: skip
                top, mass, acc = fold_tile(
                    q, k, is_row(again, limit), limit, scale_log2, top, mass, acc, DOT, SPREAD, M, N
                )
        else:
            again = tile_indices(tile, lists, SOURCES, N)
            k = tile_of(
                raw, segment, again, KIND, FAST, NATIVE, FRESH,
                ROW_DIM, NOPE, PLANE_ROWS, DOT, N, D,
            )  # fmt: skip
            top, mass, acc = fold_tile(
                q, k, is_row(again, limit), limit, scale_log2, top, mass, acc, DOT, SPREAD, M, N
            )
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


NATIVE_FP8 = (8, 9)
WGMMA = (9, 0)


@frozen
class Tile:
    """What one program works on, and how."""

    heads: int
    rows: int
    num_warps: int
    num_stages: int = 1
    eager: bool = False
    """Request the next tile's rows before this tile's products."""
    spread: bool = False
    """Spread the scores over the warpgroups: see `fold_tile`."""


WIDE = Tile(64, 64, 8, num_stages=2, eager=True, spread=True)
"""wgmma takes 64 heads. Shared memory: q 64 KB, two tiles of 64 rows of 1 KB; the sums fill half the registers."""
NARROW = Tile(16, 32, 4)
"""Few tokens, and GPUs without wgmma: 82 KB on NVIDIA, 32 KB on AMD."""
LONG = Tile(16, 16, 8)
"""Rows of more than 512 channels."""
EXACT = Tile(16, 16, 4)
"""fp32 products, unrolled multiply-adds."""
FEW_PROGRAMS = 150
"""Up to this many narrow programs of one tile each are faster than fewer wide ones: their groups of heads gather the
same rows again, which only pays while processors are idle."""


@frozen(eq=False)
class Segment:
    """A source as kernels take it."""

    rows: RowArgs
    fresh_TD: Tensor | None
    indptr_T1: Tensor
    indices_N: Tensor
    max_rows: int

    @classmethod
    def of(cls, source: Source) -> Segment:
        stream = source.stream
        return cls(
            row_args(source.view),
            source.fresh_TD,
            stream.indptr_T1,
            stream.indices_N,
            stream.max_rows,
        )

    @property
    def empty(self) -> bool:
        fresh_rows = 0 if self.fresh_TD is None else self.fresh_TD.shape[0]
        return self.max_rows == 0 or self.rows.num_rows + fresh_rows == 0

    def joins(self, other: Segment) -> bool:
        """Whether one launch can walk over both."""
        a, b = self.rows, other.rows
        same_rows = (a.kind, a.nope, a.plane_rows) == (b.kind, b.nope, b.plane_rows)
        fresh = [s.fresh_TD.dtype for s in (self, other) if s.fresh_TD is not None]
        return same_rows and len(set(fresh)) <= 1

    def args(self, fresh_TD: Tensor | None) -> tuple[object, ...]:
        """`fresh_TD`: what stands for this segment's fresh rows where it has none."""
        own_TD, num_fresh = self.fresh_TD, 0
        if own_TD is not None:
            num_fresh = own_TD.shape[0]
        elif fresh_TD is not None:
            own_TD = fresh_TD
        else:
            own_TD = self.rows.storage
        return (
            self.rows.storage, self.rows.stride, self.rows.num_rows, own_TD, own_TD.stride(0), num_fresh,
            self.indptr_T1, self.indices_N,
        )  # fmt: skip


def joined(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Neighbours in pairs, one launch each."""
    launches: list[tuple[Segment, ...]] = []
    for segment in segments:
        if launches and len(launches[-1]) == 1 and launches[-1][0].joins(segment):
            launches[-1] = (launches[-1][0], segment)
        else:
            launches.append((segment,))
    return launches


class TritonAttention(AttentionKernel):
    """One launch for up to two sources of one row format, and a second one where rows are split. Other sources get
    launches of their own, which are combined like the parts of split rows; that alone allocates, if the workspace
    is too small. Deterministic: rows are never split, and one tile shape serves all formats and batches."""

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
                f"attend: scale {scale} must be above 0: masked scores are -inf before they are scaled"
            )
        if q_THD.numel() == 0:
            return
        segments = [s for s in map(Segment.of, sources) if not s.empty]
        if not segments:
            out_THD.zero_()
            if lse_TH is not None:
                lse_TH.fill_(-torch.inf)
            return
        launches = joined(segments)
        scratch = None if workspace is None else workspace.partials
        tile, parts = self._plan(q_THD, launches, scratch)
        total = parts * len(launches)
        if total > 1:
            needed = total * q_THD.shape[0] * q_THD.shape[1] * (q_THD.shape[2] + 2)
            if scratch is None or scratch.numel() < needed:
                scratch = torch.empty(needed, dtype=torch.float32, device=q_THD.device)
        early = total > 1 and overlaps_launches(q_THD.device)
        for i, launch in enumerate(launches):
            _launch(
                q_THD, launch, sink_H, scale, out_THD, lse_TH, rope, tile,
                scratch if total > 1 else None, (i * parts, parts, total), early and i + 1 == len(launches),
            )  # fmt: skip
        if total > 1:
            assert scratch is not None
            combine_parts(
                scratch,
                total,
                sink_H,
                out_THD=out_THD,
                lse_TH=lse_TH,
                rope=rope,
                after_launch=early,
            )

    def _plan(
        self, q_THD: Tensor, launches: Sequence[Sequence[Segment]], scratch: Tensor | None
    ) -> tuple[Tile, int]:
        """Tile shape and parts of a launch, from capacities alone."""
        num_tokens, num_heads, dim = q_THD.shape
        exact = any(s.rows.kind == FP32.value for launch in launches for s in launch)
        tile = tile_for(exact or q_THD.dtype == torch.float32, dim, num_heads, q_THD.device)
        if self._deterministic or scratch is None or len(launches) > 1:
            return tile, 1
        most = min(MAX_SPLITS, scratch.numel() // (num_tokens * num_heads * (dim + 2)))
        if tile is WIDE:
            parts = num_tiles(launches[0], NARROW.rows)
            if parts <= most and parts * num_tokens * -(-num_heads // NARROW.heads) <= FEW_PROGRAMS:
                return NARROW, parts
        tiles = num_tiles(launches[0], tile.rows)
        programs = num_tokens * -(-num_heads // tile.heads)
        parts = max(1, min(tiles, most, processors(q_THD.device) // programs))
        share = -(-tiles // parts)
        return tile, -(-tiles // share)


def num_tiles(launch: Sequence[Segment], rows: int) -> int:
    """Most tiles of a token."""
    return sum(-(-segment.max_rows // rows) for segment in launch)


def tile_for(exact: bool, dim: int, num_heads: int, device: torch.device) -> Tile:
    """Tile shape for many tokens. `exact`: products in fp32."""
    if dim > 512:
        return LONG
    if exact:
        return EXACT
    return WIDE if num_heads > 32 and has_wgmma(device) else NARROW


def has_wgmma(device: torch.device) -> bool:
    """Whether products of 64 heads pay; the interpreter takes the same shapes."""
    return interpreting() or _capability(device) >= WGMMA


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it ends (programmatic dependent launch)."""
    return not interpreting() and _capability(device) >= WGMMA


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU; (0, 0) for others."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """Programs that run side by side; the interpreter plans as for an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    q_THD: Tensor,
    launch: Sequence[Segment],
    sink_H: Tensor,
    scale: float,
    out_THD: Tensor,
    lse_TH: Tensor | None,
    rope: RopeTable | None,
    tile: Tile,
    scratch: Tensor | None,
    parts: tuple[int, int, int],
    early: bool,
) -> None:
    """One walk over one or two segments. `parts`: the first one, how many, and how many of all launches."""
    num_tokens, num_heads, dim = q_THD.shape
    a, b = launch[0], launch[-1]
    fresh, stand_in = fresh_mode(launch)
    split = scratch is not None
    first, count, total = parts
    stages = (
        1 if fresh == FRESH_BY_LOAD.value and a.rows.kind != PACKED_FP8.value else tile.num_stages
    )
    exact = a.rows.kind == FP32.value or dot_dtype(q_THD) == tl.float32
    _attend_kernel[(num_tokens * -(-num_heads // tile.heads), count)](
        q_THD, q_THD.stride(0), q_THD.stride(1), sink_H, scale * LOG2_E.value,
        out_THD, out_THD.stride(0), out_THD.stride(1), *lse_args(None if split else lse_TH),
        *rope_args(None if split else rope), scratch, first, total, num_tokens * num_heads * total,
        *a.args(stand_in), *b.args(stand_in),
        SOURCES=len(launch), SAME_TABLE=same_table(a.rows, b.rows), FRESH=fresh, KIND=a.rows.kind,
        PLANE_ROWS=a.rows.plane_rows, FAST=is_fast(launch), ALIGNED=is_aligned(launch),
        NATIVE=supports_native_fp8(q_THD.device), HEADS=num_heads, ROW_DIM=dim, NOPE=a.rows.nope,
        ROPE=0 if split else rope_width(rope), PARTS=split, LSE=lse_TH is not None and not split, PDL=early,
        DOT=tl.float32 if exact else tl.bfloat16, M=tile.heads, N=tile.rows, D=max(16, next_pow2(dim)),
        STAGES=stages, EAGER=tile.eager, SPREAD=tile.spread,
        num_warps=tile.num_warps, num_stages=stages,
    )  # fmt: skip


def fresh_mode(launch: Sequence[Segment]) -> tuple[int, Tensor | None]:
    """How the kernel reads fresh rows, and a tensor for the source that has none."""
    fresh = [s.fresh_TD for s in launch if s.fresh_TD is not None]
    if not fresh:
        return NO_FRESH.value, None
    alike = all(s.rows.storage.dtype == fresh[0].dtype for s in launch)
    return (FRESH_BY_ADDRESS if alike else FRESH_BY_LOAD).value, fresh[0]


def same_table(a: RowArgs, b: RowArgs) -> bool:
    """Whether both sources read one table: its place need not be chosen tile by tile."""
    return a.storage.data_ptr() == b.storage.data_ptr() and a[1:] == b[1:]


def is_fast(launch: Sequence[Segment]) -> bool:
    """Whether packed rows have the published form: whole blocks of codes, one block of rotated channels, parts at
    multiples of 16 bytes."""
    return all(
        s.rows.kind == PACKED_FP8.value
        and s.rows.nope % 64 == 0
        and 0 < s.rows.nope <= 512
        and s.rows.row_dim - s.rows.nope == 64
        and s.rows.storage.data_ptr() % 16 == 0
        and s.rows.stride % 16 == 0
        for s in launch
    )


def is_aligned(launch: Sequence[Segment]) -> bool:
    """Whether every plain row starts at a multiple of 16 bytes."""
    tensors = [s.rows.storage for s in launch] + [
        s.fresh_TD for s in launch if s.fresh_TD is not None
    ]
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)
