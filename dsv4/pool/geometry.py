"""Sizes and addresses of a pool: the only place that turns (slot, position) into a row.

    window ring   row = slot * ring_rows + position % ring_rows
    entries       row = entry_base + page * rows_per_page + entry % rows_per_page,
                  page = block_table[slot, entry // rows_per_page]
    index keys    the same without the base (a table of their own)
    CSA state     row = slot * overlap_rows + position % overlap_rows
    HCA state     accumulator row = slot,  raw row = slot * in_place_tokens + position % in_place_tokens

Every address is a pure function of its arguments. They take ints or integer tensors alike; callers mask
what is no row (-1) themselves, before they use the result.
"""

from __future__ import annotations

from typing import TypeVar

from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from dsv4.errors import ConfigError

Index = TypeVar("Index", int, Tensor)


def num_visible(position: Index, ratio: int) -> Index:
    """Entries of `ratio` that the query at `position` may read: max(0, (position + 1) // ratio).

    The one visibility function (spec/architecture.md 3.5): entry e is visible iff its window has closed.
    """
    visible = (position + 1) // ratio
    return visible.clamp(min=0) if isinstance(visible, Tensor) else max(0, visible)


@frozen(kw_only=True)
class PoolGeometry:
    """One object sizes and addresses every table of a pool; built once from the pool and model configs."""

    max_requests: int = field(validator=ge(1))
    window: int = field(validator=ge(1))
    in_place_tokens: int = field(validator=ge(1))
    """D: most tokens of a slot that one forward stores in place; also the rollback margin."""
    ring_rows: int
    """Window rows of a slot; at least window + D - 1 so that D provisional writes never hide a visible row."""
    page_tokens: int = field(validator=ge(1))
    pages_per_slot: int = field(validator=ge(0))
    num_pages: int = field(validator=ge(0))
    entry_base: int = field(default=0, validator=ge(0))
    """Rows in front of the entries in the entry table: all window rings for the unified pool, else 0."""

    def __attrs_post_init__(self) -> None:
        need = self.window + self.in_place_tokens - 1
        if self.ring_rows < need:
            raise ConfigError(
                f"ring_rows {self.ring_rows}: window {self.window} with in_place_tokens {self.in_place_tokens} "
                f"needs at least {need} rows; raise ring_rows or lower in_place_tokens"
            )

    # sizes, in rows of one layer's table

    @property
    def window_rows(self) -> int:
        return self.max_requests * self.ring_rows

    def rows_per_page(self, ratio: int) -> int:
        return self.page_tokens // ratio

    def entry_rows(self, ratio: int) -> int:
        """Rows of the entries alone, without `entry_base`."""
        return self.num_pages * self.rows_per_page(ratio)

    def max_entries(self, ratio: int) -> int:
        """Entries one slot can hold: its pages' capacity."""
        return self.pages_per_slot * self.rows_per_page(ratio)

    def overlap_rows(self, ratio: int) -> int:
        """State ring rows of a slot in an overlapping compressor: two windows, and D - 1 for rollback."""
        return 2 * ratio + self.in_place_tokens - 1

    # addresses

    def window_row(self, slot: Index | int, position: Index) -> Index:
        return slot * self.ring_rows + position % self.ring_rows

    def entry_row(self, ratio: int, page: Index, entry: Index) -> Index:
        return self.entry_base + self.index_row(ratio, page, entry)

    def index_row(self, ratio: int, page: Index, entry: Index) -> Index:
        rows_per_page = self.rows_per_page(ratio)
        return page * rows_per_page + entry % rows_per_page

    def logical_page(self, ratio: int, entry: Index) -> Index:
        return entry // self.rows_per_page(ratio)

    def overlap_row(self, ratio: int, slot: Index | int, position: Index) -> Index:
        ring = self.overlap_rows(ratio)
        return slot * ring + position % ring

    def fold_row(self, slot: Index | int, position: Index) -> Index:
        return slot * self.in_place_tokens + position % self.in_place_tokens

    # translations for the device

    def paged_entries(self, ratio: int, block_table: Tensor) -> PagedRows:
        """Entry -> row in an entry table."""
        return PagedRows(
            block_table=block_table, rows_per_page=self.rows_per_page(ratio), base=self.entry_base
        )

    def paged_keys(self, ratio: int, block_table: Tensor) -> PagedRows:
        """Entry -> row in a table of index keys."""
        return PagedRows(block_table=block_table, rows_per_page=self.rows_per_page(ratio), base=0)


@frozen(kw_only=True, eq=False)
class PagedRows:
    """Entry -> row translation of one paged table: `base + page * rows_per_page + entry % rows_per_page`."""

    block_table: Tensor
    """[max_requests, pages_per_slot] int32, -1 = no page."""
    rows_per_page: int
    base: int

    def rows(self, slot: Tensor, entry: Tensor) -> Tensor:
        """int32 rows of entries of live slots, -1 where the page is absent. Shapes broadcast; slots and entries that
        are no row must be masked by the caller (they are clamped here, so that the lookup itself is always legal)."""
        slot = slot.clamp(min=0).long()
        entry = entry.clamp(min=0)
        logical = (entry // self.rows_per_page).clamp(max=self.block_table.shape[1] - 1).long()
        page = self.block_table[slot, logical]
        row = self.base + page * self.rows_per_page + entry % self.rows_per_page
        return row.masked_fill(page < 0, -1)
