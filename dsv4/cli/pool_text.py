"""A pool map as text: one line per table, one per region."""

from __future__ import annotations

from dsv4.cli.pool_map import PoolMap, RegionMap, TableMap, layer_ranges
from dsv4.cli.units import format_bytes

BAR_CHARS = 48
SLOT_CHARS, PAGE_CHARS = "Ss", "Pp"
"""Alternating, so that neighbours can be told apart."""


def render_text(drawn: PoolMap) -> str:
    """The whole map; a bar shows the regions of a table to scale."""
    blocks = [f"{drawn.title}; {format_bytes(drawn.nbytes)} in all"]
    blocks += [_table(table) for table in drawn.tables]
    blocks.append("S slot-owned rows, P page-owned rows; the case changes from owner to owner")
    return "\n\n".join(blocks)


def _table(table: TableMap) -> str:
    layers = f"layers {layer_ranges(table.layers)} ({table.kind})" if table.layers else "whole pool"
    times = f"{table.num_tables} x " if table.num_tables > 1 else ""
    lines = [
        f"{table.name}: {layers}; {times}{table.num_rows:,} rows {table.row_format}, "
        f"{times}{format_bytes(table.nbytes)}"
    ]
    if table.num_rows:
        lines.append(f"  [{_bar(table)}]")
    lines += [f"  {_region(region)}" for region in table.regions]
    return "\n".join(lines)


def _bar(table: TableMap) -> str:
    """Each character stands for the row at its middle."""
    return "".join(
        _mark(table, (2 * at + 1) * table.num_rows // (2 * BAR_CHARS)) for at in range(BAR_CHARS)
    )


def _mark(table: TableMap, row: int) -> str:
    for region in table.regions:
        if region.first_row <= row <= region.last_row:
            owner = (row - region.first_row) // region.rows_each
            return (SLOT_CHARS if region.owner == "slot" else PAGE_CHARS)[owner % 2]
    return "."


def _region(region: RegionMap) -> str:
    rows = f"rows {region.first_row:,}..{region.last_row:,}" if region.num_rows else "no rows"
    return f"{region.name}: {region.num_owners} {region.owner}s x {region.rows_each} rows, {rows}"
