"""Fill in one kernel launch, whatever the number of layers, plans, streams and rope bases.

The programs of the launch are divided into sections (fill_table): a program finds its section among the ends that the
launcher passes, and what to write where in the section's row of a device table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.config import ModelConfig
from dsv4.metadata import fill_sections_triton as parts
from dsv4.metadata.base import FillKernel
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, rope_names
from dsv4.metadata.fill_table import ROW, TAIL, Closing, Kind, make_sections, num_sections
from dsv4.metadata.fill_views import SharedViews
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.rope import inverse_frequencies
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PoolGeometry
from dsv4.triton_launch import KernelVariant, interpreting

KINDS = 16
"""More than there are, a power of two: a section's kind and ratio travel as one number."""
NUM_KINDS = tl.constexpr(KINDS)
SECTION_STEP = 16
"""Sections are rounded up to a multiple, with empty ones at the end: models with nearly as many share a compilation."""
NUM_WARPS = 4
NUM_STAGES = 1
"""The loops are over requests: most have one iteration, there is nothing to prefetch."""
PLAIN_NUMBERS = ["num_tokens", "num_requests", "max_query", "page_stride", "num_pages"]
"""Never compiled in: they vary from step to step."""


class Tiles(NamedTuple):
    """Tile sizes, powers of two."""

    scan: int
    """Requests summed over at a time."""
    tokens: int
    stream_tokens: int
    lanes: int
    repeat: int
    """Tiles of lanes that a program fills with what it knows of its tokens."""
    closing: int
    columns: int = 32
    rope_rows: int = 8
    pairs: int = 32

    def constexprs(self) -> dict[str, int]:
        """As the kernel names them."""
        return {name.upper(): tile for name, tile in self._asdict().items()} | {"ROW": ROW}


DECODE = Tiles(scan=256, tokens=16, stream_tokens=4, lanes=128, repeat=1, closing=8)
"""A step's work is spread over the whole device: latency counts."""
PREFILL = Tiles(scan=64, tokens=64, stream_tokens=8, lanes=64, repeat=16, closing=16)
"""Few requests, more lanes than threads: what a program learns of its tokens serves many lanes."""
PREFILL_TOKENS = 1024
"""From as many on."""
INTERPRETED = Tiles(
    scan=64,
    tokens=256,
    stream_tokens=64,
    lanes=256,
    repeat=8,
    closing=64,
    columns=64,
    rope_rows=64,
)
"""Few programs: each costs the interpreter milliseconds, however small."""


def choose_tiles(num_tokens: int) -> Tiles:
    """The only tuning choice; values do not depend on it."""
    if interpreting():
        return INTERPRETED
    return PREFILL if num_tokens >= PREFILL_TOKENS else DECODE


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _fill_kernel(
    slots, starts, query_lengths, lengths, block_table, table,
    num_tokens, num_requests, max_query, page_stride, num_pages, begins, extents, kinds_ratios,
    SCAN: tl.constexpr, TOKENS: tl.constexpr, STREAM_TOKENS: tl.constexpr, LANES: tl.constexpr,
    REPEAT: tl.constexpr, CLOSING: tl.constexpr, COLUMNS: tl.constexpr, ROPE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # a program belongs to the last section that begins at or before it; compared as they are coded, see `_coded`
    coded_program = 2 * program + 3
    begin, extent, kind_ratio, row = begins[0], extents[0], kinds_ratios[0], table
    for j in tl.static_range(1, len(begins)):
        if coded_program >= begins[j]:
            begin, extent, kind_ratio = begins[j], extents[j], kinds_ratios[j]
            row = table + j * ROW
    tile = (coded_program - begin) >> 1
    extent = (extent - 3) >> 1
    kind = ((kind_ratio - 3) >> 1) % NUM_KINDS
    ratio = ((kind_ratio - 3) >> 1) // NUM_KINDS
    batch = (slots, starts, query_lengths, lengths, num_requests)
    pages = (block_table, page_stride, num_pages)
    if kind <= parts.LANES:
        parts.stream(
            kind, tile, extent, ratio, row, batch, pages, num_tokens,
            SCAN, STREAM_TOKENS, LANES, REPEAT,
        )  # fmt: skip
    elif kind == parts.TOKENS:
        parts.tokens(tile, extent, row, batch, num_tokens, SCAN, TOKENS)
    elif kind == parts.COMPRESSED_TOKENS:
        parts.compressed_tokens(tile, extent, ratio, row, batch, SCAN, TOKENS)
    elif kind <= parts.ENTRY_ROPE:
        parts.rope(kind, tile, extent, ratio, row, batch, SCAN, ROPE_ROWS, PAIRS)
    elif kind == parts.ENTRY_LOC:
        parts.entry_loc(tile, extent, ratio, row, batch, pages, SCAN, CLOSING)
    elif kind == parts.OVERLAP:
        parts.overlap(tile, extent, ratio, row, batch, SCAN, CLOSING, COLUMNS)
    elif kind == parts.FOLD:
        parts.fold(tile, extent, ratio, row, batch, max_query, SCAN, CLOSING, COLUMNS)
    elif kind == parts.LAST_ROWS:
        parts.last_rows(row, batch, SCAN)
    else:
        parts.accumulators(ratio, row, batch, SCAN)


def _coded(number: int) -> int:
    """Odd and at least 3: the launcher compiles anew for a 1 and for multiples of 16, also where they vary."""
    return 2 * number + 3


def _padded(num_sections: int) -> int:
    return -(-num_sections // SECTION_STEP) * SECTION_STEP


def _num_programs(kind: Kind, extent: int, shape: BatchShape, tiles: Tiles) -> int:
    """Programs of a section."""
    if kind <= Kind.LANES:
        # an empty stream still has an indptr
        token_tiles = _cdiv(max(shape.num_tokens, 1), tiles.stream_tokens)
        return token_tiles * _cdiv(max(extent, 1), tiles.lanes * tiles.repeat)
    if kind in (Kind.LAST_ROWS, Kind.ACCUMULATORS):
        return 1
    if kind in (Kind.TOKENS, Kind.COMPRESSED_TOKENS):
        return _cdiv(shape.num_tokens, tiles.tokens)
    if kind in (Kind.ROPE, Kind.ENTRY_ROPE):
        return _cdiv(extent, tiles.rope_rows)
    accumulators = shape.num_requests if kind is Kind.FOLD else 0
    return _cdiv(extent + accumulators, tiles.closing)


def _cdiv(number: int, tile: int) -> int:
    return -(-number // tile)


class TritonFill(FillKernel):
    """One launch, no tensor but the buffers."""

    def __init__(
        self, model: ModelConfig, geometry: PoolGeometry, pool: KVPool, buffers: Buffers
    ) -> None:
        self._ratios, self._in_place_tokens = model.ratios, geometry.in_place_tokens
        self._pool, self._buffers = pool, buffers
        self._views = SharedViews(model, geometry, buffers)
        frequencies = {
            key: inverse_frequencies(key.theta, model.qk_rope_head_dim, key.yarn).to(pool.device)
            for key in rope_names(model)
        }
        # they hold the frequencies, which the table addresses
        self._sections = make_sections(model, geometry, frequencies)
        self._spare = _padded(len(self._sections)) - len(self._sections)
        kinds_ratios = [_coded(x.ratio * KINDS + x.kind) for x in self._sections]
        self._kinds_ratios = (*kinds_ratios, *[_coded(0)] * self._spare)
        rows = [section.row(buffers) for section in self._sections]
        self._table = torch.tensor(rows, dtype=torch.int64, device=pool.device)
        self._names = [name for section in self._sections for name in section.buffers]

    def fill(self, shape: BatchShape) -> SharedTensors:
        closing = {ratio: shape.max_closing(ratio) for ratio in self._ratios}
        self._launch(shape, closing)
        chunks = shape.max_query_tokens > self._in_place_tokens
        computed = self._buffers.computed
        computed.clear()
        computed.update(name for name in self._names if chunks or name != TAIL)
        return self._views.of(shape, closing)

    def _launch(self, shape: BatchShape, closing: Closing) -> None:
        pool, view, requests = self._pool, self._buffers.view, shape.num_requests
        tiles = choose_tiles(shape.num_tokens)
        begins, extents = [], []
        num_programs = 0
        for section in self._sections:
            begins.append(_coded(num_programs))
            extent = section.extent(shape, closing)
            extents.append(_coded(extent))
            num_programs += _num_programs(section.kind, extent, shape, tiles)
        _fill_kernel[(num_programs,)](
            view("slots", requests + 1),
            view("starts", requests + 1),
            view("query_lengths", requests + 1),
            pool.lengths,
            pool.block_table,
            self._table,
            shape.num_tokens,
            requests,
            shape.max_query_tokens,
            pool.block_table.stride(0),
            pool.block_table.shape[1],
            (*begins, *[_coded(num_programs)] * self._spare),
            (*extents, *[_coded(0)] * self._spare),
            self._kinds_ratios,
            **tiles.constexprs(),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )


def variants() -> tuple[KernelVariant, ...]:
    """Both tilings, for the published models."""
    inputs = ("slots", "starts", "query_lengths", "lengths", "block_table")
    signature: dict[str, Any] = dict.fromkeys(inputs, "*i32") | {"table": "*i64"}
    signature |= dict.fromkeys(PLAIN_NUMBERS, "i32")
    found = {}
    for preset in ("flash", "pro"):
        count = _padded(num_sections(ModelConfig.preset(preset)))
        for name, tiles in (("decode", DECODE), ("prefill", PREFILL)):
            found[count, name] = KernelVariant(
                name=f"fill_{name}_{count}",
                fn=_fill_kernel,
                signature=signature
                | dict.fromkeys(("begins", "extents", "kinds_ratios"), ("i32",) * count),
                constexprs=tiles.constexprs(),
                num_warps=NUM_WARPS,
                num_stages=NUM_STAGES,
                aligned=(*inputs, "table"),
            )
    return tuple(found.values())
