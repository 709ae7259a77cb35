"""One table per layer: the window rings of all slots, then the entries of all pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from dsv4.config import LayerConfig, PoolConfig, UnifiedPoolConfig
from dsv4.pool.formats import RowFormat
from dsv4.pool.geometry import PoolGeometry
from dsv4.pool.layout import TableSpec, entries_share, rows_table, window_share
from dsv4.pool.tables import TablePool

if TYPE_CHECKING:
    from dsv4.metadata.base import MetadataBuilder


class UnifiedPool(TablePool):
    """Both segments of a token's attention are rows of one table.

        [ slot 0 ring | slot 1 ring | ... | page 0 entries | page 1 entries | ... ]
        0                                 entry_base = max_requests * ring_rows

    A sliding layer's table ends behind the rings.
    """

    config_type: ClassVar[type[PoolConfig]] = UnifiedPoolConfig
    entries_behind_windows: ClassVar[bool] = True

    @classmethod
    def builder_class(cls) -> type[MetadataBuilder]:
        # Imported late: metadata is built on pools.
        from dsv4.metadata.unified import UnifiedMetadataBuilder

        return UnifiedMetadataBuilder

    @classmethod
    def kv_tables(
        cls, number: int, layer: LayerConfig, geometry: PoolGeometry, rows: RowFormat
    ) -> Iterator[TableSpec]:
        shares = [window_share(number, geometry)]
        num_rows = geometry.window_rows
        if layer.ratio:
            shares.append(entries_share(number, layer.ratio, geometry))
            num_rows += geometry.entry_rows(layer.ratio)
        yield rows_table(f"layer{number}.kv", number, rows, num_rows, *shares)
