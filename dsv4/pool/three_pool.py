"""Tables of their own for window rows, CSA entries and HCA entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from dsv4.config import LayerConfig, PoolConfig, ThreePoolConfig
from dsv4.pool.formats import RowFormat
from dsv4.pool.geometry import PoolGeometry
from dsv4.pool.layout import TableSpec, entries_share, rows_table, window_share
from dsv4.pool.tables import TablePool

if TYPE_CHECKING:
    from dsv4.metadata.base import MetadataBuilder


class ThreePool(TablePool):
    """The two segments of a token's attention are rows of two tables; both count from row 0.

    window of a layer    [ slot 0 ring | slot 1 ring | ... ]
    entries of a layer   [ page 0 entries | page 1 entries | ... ]
    """

    config_type: ClassVar[type[PoolConfig]] = ThreePoolConfig
    entries_behind_windows: ClassVar[bool] = False

    @classmethod
    def builder_class(cls) -> type[MetadataBuilder]:
        # Imported late: metadata is built on pools.
        from dsv4.metadata.three_pool import ThreePoolMetadataBuilder

        return ThreePoolMetadataBuilder

    @classmethod
    def kv_tables(
        cls, number: int, layer: LayerConfig, geometry: PoolGeometry, rows: RowFormat
    ) -> Iterator[TableSpec]:
        window = window_share(number, geometry)
        yield rows_table(window.name, number, rows, geometry.window_rows, window)
        if layer.ratio:
            entries = entries_share(number, layer.ratio, geometry)
            num_rows = geometry.entry_rows(layer.ratio)
            yield rows_table(entries.name, number, rows, num_rows, entries)
