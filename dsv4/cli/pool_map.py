"""What there is to draw of a pool: its tables, layers of one shape together, and the regions inside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import evolve, frozen

from dsv4 import registry
from dsv4.config import LayerKind, ModelConfig, PoolConfig
from dsv4.pool.base import Component

_LAYER = re.compile(r"^layer\d+\.")


@frozen(kw_only=True)
class RegionMap:
    """Rows of one component: `num_owners` slots or pages of `rows_each` rows."""

    name: str
    owner: str
    """`slot` or `page`."""
    num_owners: int
    rows_each: int
    first_row: int

    @property
    def num_rows(self) -> int:
        return self.num_owners * self.rows_each

    @property
    def last_row(self) -> int:
        return self.first_row + self.num_rows - 1


@frozen(kw_only=True)
class TableMap:
    """One table, and how many layers have one just like it."""

    name: str
    kind: str
    """Kind of the layers, or empty for tables of the whole pool."""
    layers: tuple[int, ...]
    row_format: str
    nbytes: int
    """Of one such table."""
    regions: tuple[RegionMap, ...]

    @property
    def num_rows(self) -> int:
        return max((region.last_row + 1 for region in self.regions), default=0)

    @property
    def num_tables(self) -> int:
        return max(1, len(self.layers))


@frozen(kw_only=True)
class PoolMap:
    title: str
    tables: tuple[TableMap, ...]

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes * table.num_tables for table in self.tables)


def pool_map(title: str, config: PoolConfig, model: ModelConfig) -> PoolMap:
    """The tables of a resolved config, from the pool's own component registry; allocates no memory."""
    # The meta device gives every component its shape and no bytes.
    pool = registry.pool_class(config)(config, model, "meta")
    geometry = pool.geometry
    tables: dict[str, list[Component]] = {}
    for component in pool.components():
        tables.setdefault(component.table, []).append(component)
    maps = [
        _table(name, parts, model, geometry.max_requests, geometry.num_pages)
        for name, parts in tables.items()
    ]
    return PoolMap(title=title, tables=tuple(_merged(maps)))


def _table(
    name: str, parts: Sequence[Component], model: ModelConfig, num_slots: int, num_pages: int
) -> TableMap:
    regions = [_region(part, num_slots, num_pages) for part in parts]
    layers = () if parts[0].layer is None else (parts[0].layer,)
    kind = ""
    if layers:
        layer = model.layers[layers[0]]
        kind = "draft" if layer.is_draft else layer.kind.value
        if layer.kind is not LayerKind.SLIDING:
            kind += f", ratio {layer.ratio}"
    row_format = parts[0].format
    return TableMap(
        name=_LAYER.sub("", name),
        kind=kind,
        layers=layers,
        row_format="int32" if row_format is None else row_format.name,
        nbytes=parts[0].nbytes,
        regions=tuple(sorted(regions, key=lambda region: region.first_row)),
    )


def _region(part: Component, num_slots: int, num_pages: int) -> RegionMap:
    paged = part.rows_per_page > 0
    return RegionMap(
        name=_LAYER.sub("", part.name),
        owner="page" if paged else "slot",
        num_owners=num_pages if paged else num_slots,
        rows_each=part.rows_per_page or part.rows_per_slot,
        first_row=part.first_row,
    )


def _merged(tables: Iterable[TableMap]) -> list[TableMap]:
    """Tables that differ in their layer alone become one, in order of first appearance."""
    merged: dict[TableMap, tuple[int, ...]] = {}
    for table in tables:
        key = evolve(table, layers=())
        merged[key] = merged.get(key, ()) + table.layers
    return [evolve(key, layers=layers) for key, layers in merged.items()]


def layer_ranges(layers: Sequence[int]) -> str:
    """`0-1, 4, 6`: runs of neighbours joined, evenly spaced ones as `2-40 by 2`."""
    if not layers:
        return ""
    step = layers[1] - layers[0] if len(layers) > 2 else 1
    if len(layers) > 2 and all(
        b - a == step
        for a, b in zip(layers, layers[1:], strict=False)  # noqa: RUF007
    ):
        return f"{layers[0]}-{layers[-1]}" + (f" by {step}" if step > 1 else "")
    return ", ".join(map(str, layers))
