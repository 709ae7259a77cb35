"""The pool itself, for any family whose components are rows of tables. A family decides which tables hold the
window rows and the entries; books, sharing, snapshots and checks are the same for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dsv4.config import LayerConfig, ModelConfig, PoolConfig, checks_enabled
from dsv4.errors import ConfigError, RollbackError, SlotError, SnapshotError
from dsv4.pool.allocator import PageAllocator, SlotAllocator
from dsv4.pool.base import Component, KVPool, KVView, MemoryReport, Region, Snapshot
from dsv4.pool.books import SlotBook
from dsv4.pool.formats import RowFormat, index_format, row_format
from dsv4.pool.geometry import PoolGeometry
from dsv4.pool.layout import PoolLayout, Share, TableSpec, build_layout
from dsv4.pool.parts import build_parts
from dsv4.pool.plan import report
from dsv4.pool.snapshot import check_fits, drop, snapshot_signature
from dsv4.pool.state import Holding, StatePart
from dsv4.pool.storage import adopt, allocate

if TYPE_CHECKING:
    from dsv4.metadata.base import MetadataBuilder


class TablePool(KVPool):
    """A KVPool of rows in tables."""

    entries_behind_windows: ClassVar[bool]
    """Whether entries start behind the window rings of their table, or at its row 0."""

    @classmethod
    @abstractmethod
    def kv_tables(
        cls, number: int, layer: LayerConfig, geometry: PoolGeometry, rows: RowFormat
    ) -> Iterator[TableSpec]:
        """The tables with the window rows and entries of layer `number`."""

    @classmethod
    def layout(cls, config: PoolConfig, model: ModelConfig) -> PoolLayout:
        """Every tensor of the pool and the geometry, without memory."""
        return build_layout(
            config, model, cls.kv_tables, entries_behind_windows=cls.entries_behind_windows
        )

    @classmethod
    def builder_class(cls) -> type[MetadataBuilder]:
        # Imported late: metadata is built on pools.
        from dsv4.metadata.table_builder import TableMetadataBuilder

        return TableMetadataBuilder

    @classmethod
    def geometry_of(cls, config: PoolConfig, model: ModelConfig) -> PoolGeometry:
        return cls.layout(config, model).geometry

    @classmethod
    def estimate(cls, config: PoolConfig, model: ModelConfig) -> MemoryReport:
        return report(cls.layout(config, model))

    @classmethod
    def storage_tables(cls, config: PoolConfig, model: ModelConfig) -> dict[str, TableSpec]:
        """Name -> shape and dtype of each tensor that `storage` must hold."""
        return {table.name: table for table in cls.layout(config, model).tables}

    def __init__(
        self,
        config: PoolConfig,
        model: ModelConfig,
        device: torch.device | str = "cpu",
        storage: Mapping[str, Tensor] | None = None,
    ) -> None:
        layout = self.layout(config, model)
        self.config = config.resolved(model)
        self.model = model
        self.geometry = layout.geometry
        self.device = torch.device(device)
        self.tensors = (
            allocate(layout, self.device)
            if storage is None
            else adopt(layout, self.device, storage)
        )
        self.lengths = self.tensors["lengths"].zero_()
        self.block_table = self.tensors["block_table"].fill_(-1)
        self.last_streams = self.tensors.get("last_streams")
        self._views: dict[tuple[int, Region], KVView] = {}
        self._components: dict[str, Component] = {}
        self._register_tables(layout)
        self._parts = build_parts(self._components, self.geometry, model)
        self._slots = SlotAllocator(self.geometry.max_requests)
        self._pages = PageAllocator(self.geometry.num_pages)
        self._books: dict[int, SlotBook] = {}
        self._version = 0
        self._poison_released = checks_enabled()
        self._signature = snapshot_signature(
            model,
            row_format(self.config.row_format, model),
            index_format(self.config.index_format, model),
        )

    def _register_tables(self, layout: PoolLayout) -> None:
        for table in layout.tables:
            storage = self.tensors[table.name]
            for share in table.shares:
                self._components[share.name] = Component(
                    name=share.name,
                    table=table.name,
                    layer=table.layer,
                    storage=storage,
                    format=table.format,
                    rows_per_slot=share.rows_per_slot,
                    rows_per_page=share.rows_per_page,
                    first_row=share.first_row,
                )
                if table.layer is not None and share.region is not None:
                    self._views[table.layer, share.region] = self._view_of(table, share)

    def _view_of(self, table: TableSpec, share: Share) -> KVView:
        storage, row_format = self.tensors[table.name], table.format
        assert row_format is not None, f"{table.name} is read through a view"
        if share.region is not Region.WINDOW:
            return KVView(storage, table.num_rows, row_format)
        # Every layer's WINDOW view has the same rows, wherever in its table they are: one index stream serves all.
        first_plane, inside = divmod(share.first_row, row_format.plane_rows)
        if inside:
            raise ConfigError(
                f"{share.name}: starts at row {share.first_row}, which is inside a plane of "
                f"{row_format.plane_rows} rows; start the window rings on a plane's first row"
            )
        rings = storage[first_plane:] if first_plane else storage
        return KVView(rings, self.geometry.window_rows, row_format)

    # request life

    def acquire(self) -> int:
        slot = self._slots.acquire()
        self._books[slot] = SlotBook()
        self._set_length(slot, 0)
        for part in self._parts:
            part.reset(slot)
        return slot

    def reserve(self, slot: int, total_tokens: int) -> None:
        # index, here and below: slots and counts come out of tensors and arrays as well.
        slot, total_tokens = index(slot), index(total_tokens)
        book = self._book(slot)
        if total_tokens > self.config.max_context:
            raise SlotError(
                f"slot {slot}: {total_tokens} tokens asked for, max_context is "
                f"{self.config.max_context}; raise max_context or shorten the request"
            )
        if total_tokens <= book.reserved:
            return
        missing = self._pages_for(total_tokens) - len(book.pages)
        if missing > 0:
            purpose = f"slot {slot}: reserving {total_tokens} tokens"
            self._append_pages(slot, self._pages.allocate(missing, purpose=purpose))
        book.reserved = total_tokens

    def release(self, slot: int) -> None:
        slot = index(slot)
        book = self._book(slot)
        freed = self._pages.release(book.pages)
        if self._poison_released:
            for part in self._parts:
                part.poison_slot(slot)
                for page in freed:
                    part.poison_page(page)
        del self._books[slot]
        self.block_table[slot] = -1
        self._set_length(slot, 0)
        self._slots.release(slot)

    def fork(self, src: int) -> int:
        src = index(src)
        book = self._exact_book(src, "fork")
        page_tokens = self.geometry.page_tokens
        num_shared = book.length // page_tokens if self._paged else 0
        # Up to what is written, not what is committed: the fork may still commit the source's provisional tokens.
        copies = self._pages_for(book.highest) - num_shared
        self._pages.require(copies, purpose=f"slot {src}: forking {book.highest} tokens")
        slot = self._slots.acquire()
        shared = book.pages[:num_shared]
        self._pages.share(shared)
        copied = self._pages.allocate(copies, purpose=f"slot {src}: forking")
        for part in self._parts:
            part.reset(slot)
            part.copy_slot(src, slot)
            for source, target in zip(book.pages[num_shared:], copied, strict=False):
                part.copy_page(source, target)
        floor = max(book.floor, num_shared * page_tokens)
        reserved = (num_shared + copies) * page_tokens if self._paged else book.highest
        book.floor = floor
        self._books[slot] = SlotBook(
            length=book.length,
            reserved=min(reserved, self.config.max_context),
            written=book.highest,
            floor=floor,
        )
        self._append_pages(slot, shared + copied)
        self._set_length(slot, book.length)
        return slot

    def export(self, slot: int) -> Snapshot:
        slot = index(slot)
        book = self._exact_book(slot, "export")
        handled = {component.name for part in self._parts for component in part.components}
        unhandled = [part.name for part in self.components() if part.name not in handled]
        if unhandled:
            raise SnapshotError(
                f"components {', '.join(unhandled)}: no part exports them; register one for each kind"
            )
        holding = self._holding(slot)
        tensors: dict[str, Tensor] = {}
        for part in self._parts:
            tensors |= part.export(holding)
        return Snapshot(length=book.length, signature=self._signature, tensors=tensors)

    def attach(self, slot: int, snapshot: Snapshot) -> None:
        slot = index(slot)
        book = self._book(slot)
        check_fits(snapshot, self._signature, self._parts)
        if book.length:
            raise SlotError(
                f"slot {slot}: has {book.length} tokens, attach needs an empty slot; acquire another"
            )
        if book.reserved < snapshot.length:
            raise SlotError(
                f"slot {slot}: {book.reserved} tokens reserved, the snapshot has {snapshot.length}; "
                f"reserve at least that many first"
            )
        book.length = book.written = book.floor = snapshot.length
        holding = self._holding(slot)
        for part in self._parts:
            part.attach(holding, snapshot.tensors)
        self._set_length(slot, snapshot.length)

    def drop(self, snapshot: Snapshot) -> None:
        drop(snapshot)

    # lengths

    def begin_forward(self, slots: Sequence[int], query_lengths: Sequence[int]) -> None:
        begun: dict[int, int] = {}
        for slot, num_tokens in zip(map(index, slots), map(index, query_lengths), strict=True):
            if slot == -1 or num_tokens == 0:
                continue
            if slot in begun:
                raise SlotError(f"slot {slot}: given twice in one forward; give each slot once")
            book = self._settled_book(slot, "another forward")
            begun[slot] = num_tokens
            if num_tokens < 0 or book.length + book.lead + num_tokens > book.reserved:
                raise SlotError(
                    f"slot {slot}: {num_tokens} tokens at length {book.length + book.lead} do not fit the "
                    f"{book.reserved} tokens reserved; reserve more first"
                )
        for slot, num_tokens in begun.items():
            self._books[slot].begin(num_tokens)

    def advance(
        self, slots_B: Tensor, accepted_B: Tensor, query_lengths: Mapping[int, int]
    ) -> None:
        live_B = slots_B >= 0
        step_B = torch.where(live_B, accepted_B.to(self.device, torch.int32), 0)
        # a request without a slot adds 0 to slot 0: an ordinary slot, unchanged
        self.lengths.index_add_(0, slots_B.clamp(min=0), step_B)
        self._version += 1
        for slot, num_tokens in query_lengths.items():
            self._book(slot).advance(idle=num_tokens == 0)

    def lead(self, slot: int) -> int:
        return self._book(index(slot)).lead

    def commit(self, slot: int, num_tokens: int) -> None:
        slot, num_tokens = index(slot), index(num_tokens)
        book = self._book(slot)
        if not 0 <= num_tokens <= book.most_accepted:
            raise SlotError(
                f"slot {slot}: committing {num_tokens} tokens at length {book.length}, "
                f"0..{book.most_accepted} were begun; begin_forward comes first"
            )
        book.commit(num_tokens)
        if book.lead:
            self._version += 1
        else:
            # No news where the host mirrors the device; where it kept fewer tokens (a stop string), it decides.
            self._set_length(slot, book.length)

    def rollback(self, slot: int, length: int) -> None:
        slot, length = index(slot), index(length)
        book = self._book(slot)
        if book.lead:
            raise RollbackError(
                f"slot {slot}: rollback while the device is {book.lead_forwards} forwards ahead; commit them first"
            )
        lowest = max(0, book.floor, book.highest - self.geometry.in_place_tokens)
        if not lowest <= length <= book.length:
            raise RollbackError(
                f"slot {slot}: rollback to {length} from length {book.length}; possible is {lowest} and up "
                f"(written up to {book.highest}, margin {self.geometry.in_place_tokens}, fixed below "
                f"{book.floor}); raise in_place_tokens or attach a snapshot"
            )
        book.length = length
        self._set_length(slot, length)

    def length(self, slot: int) -> int:
        return self._book(index(slot)).length

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    def generation(self, slot: int) -> int:
        """How many owners of this slot have come and gone."""
        return self._slots.generation(slot)

    # device side

    def view(self, layer: int, region: Region) -> KVView:
        try:
            return self._views[layer, region]
        except KeyError:
            kind = (
                self.model.layers[layer].kind.value
                if 0 <= layer < len(self.model.layers)
                else "missing"
            )
            raise ConfigError(
                f"layer {layer}: a {kind} layer of this model has no region {region.value}; "
                f"ask for one of its own"
            ) from None

    def components(self) -> tuple[Component, ...]:
        return tuple(self._components.values())

    def register(self, part: StatePart) -> None:
        """Add components of another kind; reset, fork, export and attach will go through `part`."""
        taken = [part.name for part in part.components if part.name in self._components]
        if taken:
            raise ConfigError(f"components {', '.join(taken)}: registered already; use other names")
        self._components |= {component.name: component for component in part.components}
        self._parts.append(part)

    # books

    @property
    def _paged(self) -> bool:
        return self.geometry.pages_per_slot > 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.geometry.page_tokens) if self._paged else 0

    def _book(self, slot: int) -> SlotBook:
        self._slots.require(slot)
        return self._books[slot]

    def _exact_book(self, slot: int, purpose: str) -> SlotBook:
        """The book of a slot whose state at the host's length is whole."""
        book = self._settled_book(slot, purpose)
        if book.lead:
            raise SlotError(
                f"slot {slot}: {purpose} while the device is {book.lead_forwards} forwards ahead; commit them first"
            )
        return book

    def _settled_book(self, slot: int, purpose: str) -> SlotBook:
        """The book of a slot with no more than D tokens written behind its length, the device's if that is ahead."""
        book = self._book(slot)
        if book.open_tokens > self.geometry.in_place_tokens:
            raise SlotError(
                f"slot {slot}: {purpose} at length {book.length}, but positions up to {book.highest} were written "
                f"and only {self.geometry.in_place_tokens} can be undone; commit them or release the slot"
            )
        return book

    def _holding(self, slot: int) -> Holding:
        book = self._books[slot]
        return Holding(slot=slot, length=book.length, pages=book.pages)

    def _append_pages(self, slot: int, pages: list[int]) -> None:
        held = self._books[slot].pages
        row = torch.tensor(pages, dtype=torch.int32)
        self.block_table[slot, len(held) : len(held) + len(pages)] = row
        held += pages
        self._version += 1

    def _set_length(self, slot: int, length: int) -> None:
        # Absolute, so that it does not matter whether the device has moved its copy already.
        self.lengths[slot] = length
        self._version += 1
