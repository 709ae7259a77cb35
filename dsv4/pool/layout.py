"""What tables a pool has, as plain descriptions: sizes and row formats, but no memory.

`estimate` adds the descriptions up, the pool allocates (or adopts) one tensor per description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import torch
from attrs import frozen

from dsv4.config import LayerConfig, LayerKind, ModelConfig, PoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.base import Region
from dsv4.pool.formats import PlainRows, RowFormat, index_format, row_format
from dsv4.pool.geometry import PoolGeometry

MAX_ROWS = 2**31 - 1
"""Rows travel as int32."""
MAX_FOLDED_TOKENS = 2**24
"""The accumulator counts its tokens in fp32, which is exact up to here."""


@frozen(kw_only=True)
class Share:
    """The rows of one table that belong to one component."""

    name: str
    region: Region | None
    rows_per_slot: int = 0
    rows_per_page: int = 0
    first_row: int = 0


@frozen(kw_only=True, eq=False)
class TableSpec:
    """One tensor of a pool."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_rows: int
    format: RowFormat | None
    """None for bookkeeping, whose rows are plain numbers."""
    shares: tuple[Share, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@frozen(kw_only=True, eq=False)
class PoolLayout:
    """Every tensor of a pool, and the geometry that addresses them."""

    geometry: PoolGeometry
    tables: tuple[TableSpec, ...]


KVTables = Callable[[int, LayerConfig, PoolGeometry, RowFormat], Iterator[TableSpec]]
"""(layer, its config, geometry, row format) -> the layer's tables of window rows and entries: what a family decides."""


def build_layout(
    config: PoolConfig, model: ModelConfig, kv_tables: KVTables, *, entries_behind_windows: bool
) -> PoolLayout:
    """The tables of a pool family; ConfigError if an address would not fit its integer type."""
    config = config.resolved(model)
    geometry = build_geometry(config, model, entries_behind_windows=entries_behind_windows)
    rows = row_format(config.row_format, model)
    keys = index_format(config.index_format, model)
    tables: list[TableSpec] = []
    for index, layer in enumerate(model.layers):
        tables += kv_tables(index, layer, geometry, rows)
        tables += _state_tables(index, layer, geometry, model)
        if layer.kind is LayerKind.CSA:
            tables.append(_index_table(index, layer, geometry, keys))
    tables += _slot_tables(geometry, model)
    _check_limits(config, model, tables)
    return PoolLayout(geometry=geometry, tables=tuple(tables))


def build_geometry(
    config: PoolConfig, model: ModelConfig, *, entries_behind_windows: bool
) -> PoolGeometry:
    """Geometry of a resolved config. A model that compresses nothing needs no pages."""
    assert config.page_tokens is not None, "the config is resolved"
    assert config.num_pages is not None, "the config is resolved"
    paged = bool(model.ratios)
    geometry = PoolGeometry(
        max_requests=config.max_requests,
        window=model.sliding_window,
        in_place_tokens=config.in_place_tokens,
        ring_rows=model.sliding_window + config.in_place_tokens - 1,
        page_tokens=config.page_tokens,
        pages_per_slot=-(-config.max_context // config.page_tokens) if paged else 0,
        num_pages=config.num_pages if paged else 0,
    )
    if entries_behind_windows:
        geometry = attrs.evolve(geometry, entry_base=geometry.window_rows)
    return geometry


def rows_table(
    name: str, layer: int | None, rows: RowFormat, num_rows: int, *shares: Share
) -> TableSpec:
    """A table of rows of one format."""
    return TableSpec(
        name=name,
        layer=layer,
        shape=rows.storage_shape(num_rows),
        dtype=rows.storage_dtype,
        num_rows=num_rows,
        format=rows,
        shares=shares,
    )


def window_share(layer: int, geometry: PoolGeometry) -> Share:
    return Share(
        name=f"layer{layer}.window", region=Region.WINDOW, rows_per_slot=geometry.ring_rows
    )


def entries_share(layer: int, ratio: int, geometry: PoolGeometry) -> Share:
    return Share(
        name=f"layer{layer}.entries",
        region=Region.ENTRIES,
        rows_per_page=geometry.rows_per_page(ratio),
        first_row=geometry.entry_base,
    )


def _index_table(
    index: int, layer: LayerConfig, geometry: PoolGeometry, keys: RowFormat
) -> TableSpec:
    name = f"layer{index}.index"
    share = Share(name=name, region=Region.INDEX, rows_per_page=geometry.rows_per_page(layer.ratio))
    return rows_table(name, index, keys, geometry.entry_rows(layer.ratio), share)


def _state_tables(
    index: int, layer: LayerConfig, geometry: PoolGeometry, model: ModelConfig
) -> Iterator[TableSpec]:
    """Running state of the layer's compressors: fp32, a fixed number of rows per slot."""
    wide, narrow = model.head_dim, model.index_head_dim
    if layer.kind is LayerKind.CSA:
        ring = geometry.overlap_rows(layer.ratio)
        # kv and gate + ape, each with an A half (for the next entry) and a B half (for the own).
        yield _slot_rows(index, Region.STATE, geometry, ring, 4 * wide)
        yield _slot_rows(index, Region.INDEX_STATE, geometry, ring, 4 * narrow)
    elif layer.kind is LayerKind.HCA:
        yield _slot_rows(index, Region.STATE, geometry, geometry.in_place_tokens, 2 * wide)
        yield _slot_rows(index, Region.ACCUMULATOR, geometry, 1, 3 * wide + 1)


def _slot_rows(
    layer: int, region: Region, geometry: PoolGeometry, rows_per_slot: int, row_dim: int
) -> TableSpec:
    name = f"layer{layer}.{region.value}"
    share = Share(name=name, region=region, rows_per_slot=rows_per_slot)
    num_rows = geometry.max_requests * rows_per_slot
    return rows_table(name, layer, PlainRows(torch.float32, row_dim), num_rows, share)


def _slot_tables(geometry: PoolGeometry, model: ModelConfig) -> Iterator[TableSpec]:
    """Tables of the whole pool with one row per slot."""
    slots = geometry.max_requests
    if model.draft_layers:
        streams = PlainRows(torch.float32, model.hc_mult * model.hidden_size)
        share = Share(name="last_streams", region=None, rows_per_slot=1)
        yield rows_table("last_streams", None, streams, slots, share)
    for name, shape in (("lengths", (slots,)), ("block_table", (slots, geometry.pages_per_slot))):
        yield TableSpec(
            name=name,
            layer=None,
            shape=shape,
            dtype=torch.int32,
            num_rows=slots,
            format=None,
            shares=(Share(name=name, region=None, rows_per_slot=1),),
        )


def _check_limits(config: PoolConfig, model: ModelConfig, tables: list[TableSpec]) -> None:
    largest = max(tables, key=lambda table: table.num_rows)
    if largest.num_rows > MAX_ROWS:
        raise ConfigError(
            f"{largest.name}: {largest.num_rows} rows, at most {MAX_ROWS} can be addressed; "
            f"lower max_requests, max_context or num_pages"
        )
    folds = any(layer.kind is LayerKind.HCA for layer in model.layers)
    if folds and config.max_context > MAX_FOLDED_TOKENS:
        raise ConfigError(
            f"max_context {config.max_context}: HCA layers count tokens exactly up to "
            f"{MAX_FOLDED_TOKENS}; lower max_context"
        )
