"""What a sequence consists of: one `StatePart` per registered component (or pair), each with its own way to be
reset, copied, exported and attached.

The pool walks its list of parts and knows no kinds; a component without a part stops an export. Exports are
stored bytes in position order, so they fit any ring size, page size and pool family.
"""

# K rows of a table, C channels of a head, B elements of one row's encoding

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4.pool.base import Component
from dsv4.pool.fold import EMPTY_MAX, fold_step
from dsv4.pool.formats import RowFormat
from dsv4.pool.geometry import PoolGeometry

POISON_BYTE = 0x7F
"""e4m3 NaN, and 2^0 as an E8M0 scale: decoding it gives NaN."""


@frozen(kw_only=True)
class Holding:
    """What the host knows of the sequence in a slot."""

    slot: int
    length: int
    pages: Sequence[int]


class StatePart(ABC):
    """Handles its components; every tensor argument and result holds stored rows, not values."""

    def __init__(self, *components: Component) -> None:
        self.components = components

    def reset(self, slot: int) -> None:  # noqa: B027  an optional step
        """Start of life. What is addressed by position needs none: only written positions are read."""

    def copy_slot(self, source: int, target: int) -> None:
        """Make the slot-owned rows of `target` those of `source`."""
        for component in self.components:
            _copy(component, component.rows_of_slot(source), component.rows_of_slot(target))

    def copy_page(self, source: int, target: int) -> None:
        """Make the rows of page `target` those of page `source`."""
        for component in self.components:
            _copy(component, component.rows_of_page(source), component.rows_of_page(target))

    def poison_slot(self, slot: int) -> None:
        """Overwrite slot-owned rows so that reading them shows."""
        for component in self.components:
            _poison(component, component.rows_of_slot(slot))

    def poison_page(self, page: int) -> None:
        """Overwrite the rows of a page so that reading them shows."""
        for component in self.components:
            _poison(component, component.rows_of_page(page))

    @abstractmethod
    def exported_rows(self, length: int) -> dict[str, int]:
        """Names of what `export` gives, and the number of rows of each at a length."""

    @abstractmethod
    def export(self, holding: Holding) -> dict[str, Tensor]:
        """The state at `holding.length`, [rows, B] each, sharing no memory with the pool."""

    @abstractmethod
    def attach(self, holding: Holding, exported: Mapping[str, Tensor]) -> None:
        """Write what `export` gave into the rows of `holding`."""


class Bookkeeping(StatePart):
    """Lengths and block table: a snapshot carries the length itself, pages are the receiving pool's own."""

    def copy_slot(self, source: int, target: int) -> None:
        """Nothing: the pool writes them from its books, where the two slots differ."""

    def poison_slot(self, slot: int) -> None:
        """Nothing: a slot that is not live has length 0 and no pages."""

    def exported_rows(self, length: int) -> dict[str, int]:
        return {}

    def export(self, holding: Holding) -> dict[str, Tensor]:
        return {}

    def attach(self, holding: Holding, exported: Mapping[str, Tensor]) -> None:
        return None


class PositionedRows(StatePart):
    """A component whose rows each stand for one position, entry or slot: exported one by one, in order."""

    def __init__(self, component: Component, geometry: PoolGeometry) -> None:
        super().__init__(component)
        self.component = component
        self.geometry = geometry

    @abstractmethod
    def span(self, length: int) -> range:
        """Positions (or entries) that a sequence of that length still needs."""

    @abstractmethod
    def rows(self, holding: Holding, span_K: Tensor) -> Tensor:
        """int64 table rows [K] of the positions (or entries)."""

    def exported_rows(self, length: int) -> dict[str, int]:
        return {self.component.name: len(self.span(length))}

    def export(self, holding: Holding) -> dict[str, Tensor]:
        rows_format, storage = _format(self.component), self.component.storage
        return {self.component.name: rows_format.export_rows(storage, self._rows(holding))}

    def attach(self, holding: Holding, exported: Mapping[str, Tensor]) -> None:
        storage = self.component.storage
        encoded_KB = exported[self.component.name].to(storage.device)
        _format(self.component).import_rows(storage, self._rows(holding), encoded_KB)

    def _rows(self, holding: Holding) -> Tensor:
        span = self.span(holding.length)
        span_K = torch.arange(span.start, span.stop, device=self.component.storage.device)
        return self.rows(holding, span_K)


class WindowRing(PositionedRows):
    """The last `window` raw rows of a layer.

    Right after a forward of D provisional tokens the oldest of them may be overwritten already; a main layer
    does not read it again (the token at `length` sees window - 1 rows), and a draft layer runs behind.
    """

    def span(self, length: int) -> range:
        return range(max(0, length - self.geometry.window), length)

    def rows(self, holding: Holding, span_K: Tensor) -> Tensor:
        return self.component.first_row + self.geometry.window_row(holding.slot, span_K)


class OverlapRing(PositionedRows):
    """Raw state of a CSA compressor: the last closed window (its A half pools again) and the open one."""

    def __init__(self, component: Component, geometry: PoolGeometry, ratio: int) -> None:
        super().__init__(component, geometry)
        self.ratio = ratio

    def span(self, length: int) -> range:
        return range(max(0, self.ratio * (length // self.ratio - 1)), length)

    def rows(self, holding: Holding, span_K: Tensor) -> Tensor:
        return self.geometry.overlap_row(self.ratio, holding.slot, span_K)


class PageEntries(PositionedRows):
    """Entries or index keys: every closed one since position 0."""

    def __init__(self, component: Component, geometry: PoolGeometry, ratio: int) -> None:
        super().__init__(component, geometry)
        self.ratio = ratio

    def span(self, length: int) -> range:
        return range(length // self.ratio)

    def rows(self, holding: Holding, span_K: Tensor) -> Tensor:
        logical_K = self.geometry.logical_page(self.ratio, span_K)
        page_K = torch.tensor(holding.pages, dtype=torch.int64, device=span_K.device)[logical_K]
        row_K = self.geometry.index_row(self.ratio, page_K, span_K)
        return self.component.first_row + row_K


class LastToken(PositionedRows):
    """One row per slot that belongs to the last token, whatever its position."""

    def span(self, length: int) -> range:
        return range(max(0, length - 1), length)

    def rows(self, holding: Holding, span_K: Tensor) -> Tensor:
        return torch.full_like(span_K, holding.slot)


class FoldedWindow(StatePart):
    """An HCA compressor: an accumulator that holds tokens up to its own count, and the D newest raw rows.

    The accumulator lags so that the newest tokens can be rolled back. An export folds it on, in token order, up to
    the length: `max | sum | weighted sum` of the open window, one row, or none where a window has just closed.
    """

    def __init__(
        self, accumulator: Component, raw: Component, geometry: PoolGeometry, ratio: int
    ) -> None:
        super().__init__(accumulator, raw)
        self.accumulator = accumulator
        self.raw = raw
        self.geometry = geometry
        self.ratio = ratio

    def reset(self, slot: int) -> None:
        # A count of 0 makes the window empty; the other columns are then never read.
        self.accumulator.storage[slot, -1] = 0

    def exported_rows(self, length: int) -> dict[str, int]:
        return {self.accumulator.name: 1 if length % self.ratio else 0}

    def export(self, holding: Holding) -> dict[str, Tensor]:
        if holding.length % self.ratio:
            state_1B = torch.cat(self._folded(holding)).unsqueeze(0)
        else:
            width = self.accumulator.storage.shape[1] - 1
            state_1B = self.accumulator.storage.new_empty((0, width))
        return {self.accumulator.name: state_1B}

    def attach(self, holding: Holding, exported: Mapping[str, Tensor]) -> None:
        row_B = self.accumulator.storage[holding.slot]
        channels = self.raw.storage.shape[1] // 2
        row_B[:channels] = EMPTY_MAX
        row_B[channels:-1] = 0
        for state_B in exported[self.accumulator.name]:
            row_B[:-1] = state_B.to(row_B.device)
        row_B[-1] = holding.length

    def _folded(self, holding: Holding) -> tuple[Tensor, Tensor, Tensor]:
        """(max, sum, weighted sum) of the open window's tokens, [channels] each; no host sync."""
        start = holding.length - holding.length % self.ratio
        row_B = self.accumulator.storage[holding.slot]
        count = row_B[-1]
        channels = self.raw.storage.shape[1] // 2
        # A count at or before the start belongs to an earlier window: ours begins empty.
        begun = count > start
        max_C = torch.where(begun, row_B[:channels], EMPTY_MAX)
        sum_C = torch.where(begun, row_B[channels : 2 * channels], 0.0)
        weighted_C = torch.where(begun, row_B[2 * channels : -1], 0.0)
        oldest_raw = max(start, holding.length - self.geometry.in_place_tokens)
        for position in range(oldest_raw, holding.length):
            raw_B = self.raw.storage[self.geometry.fold_row(holding.slot, position)]
            gate_C = torch.where(count <= position, raw_B[channels:], EMPTY_MAX)
            max_C, sum_C, weighted_C = fold_step(max_C, sum_C, weighted_C, gate_C, raw_B[:channels])
        return max_C, sum_C, weighted_C


def _format(component: Component) -> RowFormat:
    assert component.format is not None, f"{component.name} has no row format"
    return component.format


def _row_indices(component: Component, rows: range) -> Tensor:
    return torch.arange(rows.start, rows.stop, device=component.storage.device)


def _copy(component: Component, source: range, target: range) -> None:
    if len(source):
        _format(component).copy_rows(
            component.storage, _row_indices(component, source), _row_indices(component, target)
        )


def _poison(component: Component, rows: range) -> None:
    if not len(rows):
        return
    rows_K = _row_indices(component, rows)
    encoded_KB = _format(component).export_rows(component.storage, rows_K)
    filler = torch.nan if encoded_KB.is_floating_point() else POISON_BYTE
    _format(component).import_rows(component.storage, rows_K, torch.full_like(encoded_KB, filler))
