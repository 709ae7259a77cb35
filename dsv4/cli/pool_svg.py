"""A pool map as an SVG picture: one bar per table, its regions to scale, slots and pages as cells."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from dsv4.cli.pool_map import PoolMap, RegionMap, TableMap, layer_ranges
from dsv4.cli.units import format_bytes

WIDTH, MARGIN, BAR_HEIGHT, TABLE_HEIGHT, TOP = 960, 24, 30, 92, 64
MAX_CELLS = 128
"""Cells drawn of one region; more would be thinner than their outline."""
CHAR_WIDTH = 6.0
"""Pixels of a label's character, about."""
MIN_REGION = 6.0
"""Width in pixels that even the smallest region gets."""
COLOURS = {
    "window": "#4c78a8",
    "entries": "#f58518",
    "index": "#54a24b",
    "state": "#b279a2",
    "index_state": "#9d755d",
    "accumulator": "#e45756",
}
OTHER = "#8a8a8a"


def render_svg(drawn: PoolMap) -> str:
    """A stand-alone SVG document."""
    height = TOP + TABLE_HEIGHT * len(drawn.tables) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(drawn.title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(MARGIN, 28, drawn.title, size=15),
        _text(MARGIN, 46, f"{format_bytes(drawn.nbytes)} in all; a cell is one slot or one page"),
    ]
    for number, table in enumerate(drawn.tables):
        lines += _table(table, TOP + number * TABLE_HEIGHT)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _table(table: TableMap, top: float) -> Iterator[str]:
    where = f"layers {layer_ranges(table.layers)} ({table.kind})" if table.layers else "whole pool"
    times = f"{table.num_tables} x " if table.num_tables > 1 else ""
    label = (
        f"{table.name}: {where}; {times}{table.num_rows:,} rows {table.row_format}, "
        f"{times}{format_bytes(table.nbytes)}"
    )
    yield _text(MARGIN, top + 16, label)
    regions = [region for region in table.regions if region.num_rows]
    left = label_left = float(MARGIN)
    for region, width in zip(regions, _widths(regions), strict=True):
        yield from _cells(region, left, top + 24, width)
        # A label starts under its region, or behind the label of a narrow region before it.
        label_left, label = max(left, label_left), _label(region)
        yield _text(label_left, top + 24 + BAR_HEIGHT + 14, label, size=11)
        label_left += CHAR_WIDTH * (len(label) + 2)
        left += width


def _widths(regions: list[RegionMap]) -> list[float]:
    """To scale, but wide enough to be seen."""
    total = sum(region.num_rows for region in regions)
    room = WIDTH - 2 * MARGIN - MIN_REGION * len(regions)
    return [MIN_REGION + room * region.num_rows / total for region in regions]


def _label(region: RegionMap) -> str:
    return f"{region.name}: {region.num_owners} {region.owner}s x {region.rows_each} rows"


def _cells(region: RegionMap, left: float, top: float, width: float) -> Iterator[str]:
    colour = COLOURS.get(region.name, OTHER)
    tip = f"{_label(region)}, rows {region.first_row}..{region.last_row}"
    yield f"<g><title>{escape(tip)}</title>"
    num_cells = min(region.num_owners, MAX_CELLS)
    cell = width / num_cells
    for number in range(num_cells):
        yield (
            f'<rect x="{left + number * cell:.2f}" y="{top}" width="{cell:.2f}" '
            f'height="{BAR_HEIGHT}" fill="{colour}" fill-opacity="{0.85 if number % 2 else 0.6}" '
            'stroke="white" stroke-width="0.5"/>'
        )
    yield "</g>"


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}">{escape(text)}</text>'
