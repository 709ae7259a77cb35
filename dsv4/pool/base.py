"""The abstract KV memory pool: who owns which row, and what survives a forward.

Words: a *slot* is a request's identity (0 <= slot < max_requests); its *length* counts committed tokens; `D` is
`config.in_place_tokens`. Everything a slot owns is a registered `Component`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4.config import ModelConfig, PoolConfig
from dsv4.pool.formats import RowFormat
from dsv4.pool.geometry import PoolGeometry

if TYPE_CHECKING:
    from dsv4.metadata.base import MetadataBuilder


class Region(enum.Enum):
    """What a table of a layer holds. In the unified pool WINDOW and ENTRIES are views of one table."""

    WINDOW = "window"
    ENTRIES = "entries"
    INDEX = "index"
    """Indexer keys of a CSA layer."""
    STATE = "state"
    """Raw `kv | gate + ape` rows of the main compressor (fp32): CSA overlap_rows, HCA D rows."""
    INDEX_STATE = "index_state"
    """The CSA ring of the indexer's own compressor."""
    ACCUMULATOR = "accumulator"
    """HCA: one fp32 row per slot, `max | sum | weighted sum | tokens folded so far`."""


@frozen(eq=False)
class KVView:
    """One table as kernels see it: storage, number of rows, and the format that reads and writes them."""

    storage: Tensor
    num_rows: int
    format: RowFormat

    def read(self, rows_K: Tensor) -> Tensor:
        """Values of rows, fp32 [*rows.shape, row_dim]; every row must exist: callers mask the rest."""
        return self.format.read(self.storage, rows_K)

    def write(self, rows_K: Tensor, values_KD: Tensor) -> None:
        """Encode and store values; rows outside [0, num_rows) write nothing."""
        self.format.write(self.storage, rows_K, values_KD, num_rows=self.num_rows)


@frozen(kw_only=True, eq=False)
class Component:
    """One registered piece of pool memory: enough to zero, transfer or offload a slot's or a page's share."""

    name: str
    """Unique, and the same in every pool family, e.g. `layer3.entries`."""
    table: str
    """The tensor that holds it, as `estimate` and `storage` name it; components may share one."""
    layer: int | None
    storage: Tensor
    format: RowFormat | None
    """How a row is laid out in the storage; None where rows are plain numbers (lengths, block table)."""
    rows_per_slot: int = 0
    """Rows a slot owns for life (rings, state), 0 for paged components."""
    rows_per_page: int = 0
    """Rows of one page, 0 for slot-owned components."""
    first_row: int = 0
    """Row of the storage where slot 0 or page 0 starts (the unified table keeps entries behind the rings)."""

    def rows_of_slot(self, slot: int) -> range:
        """Rows that the slot owns for life; empty for a paged component."""
        start = self.first_row + slot * self.rows_per_slot
        return range(start, start + self.rows_per_slot)

    def rows_of_page(self, page: int) -> range:
        """Rows of one page; empty for a slot-owned component."""
        start = self.first_row + page * self.rows_per_page
        return range(start, start + self.rows_per_page)

    @property
    def data_ptr(self) -> int:
        return self.storage.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor; components of one table report the same tensor."""
        return self.storage.numel() * self.storage.element_size()

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self.storage.stride())


@frozen(kw_only=True)
class MemoryReport:
    """Bytes by table name, and what a token and a slot cost. Computed without allocating."""

    components: Mapping[str, int]
    bytes_per_token: float
    """Entries and index keys, averaged over a page."""
    bytes_per_slot: int
    """Rings, state and bookkeeping rows of one slot."""

    @property
    def total(self) -> int:
        return sum(self.components.values())


@frozen(kw_only=True, eq=False)
class Snapshot:
    """A sequence's whole state at `length`, in position order: attaches to any ring size and any pool
    family of the same row formats and model table. `tensors` is empty once the snapshot is dropped."""

    length: int
    signature: tuple[object, ...]
    """What must be equal for an exact attach: layer kinds and ratios, row formats, widths."""
    tensors: dict[str, Tensor] = field(repr=False)
    """Component name -> stored rows in position order."""

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class KVPool(ABC):
    """Owns every row a request reads or writes. Promises, each with a conformance test in `dsv4.testing`:

     1. Nothing depends on the initial contents of any tensor.
     2. `estimate` equals the sum of the bytes of all tensors that the pool then allocates, and allocates nothing.
     3. `acquire` returns a live slot of length 0 or raises PoolExhaustedError; slots are reused, state is not.
     4. `reserve(slot, n)` makes positions [0, n) addressable, all or nothing; reserving less is a no-op.
     5. `release` returns the slot and exactly its unshared pages.
     6. `commit(slot, n)` adds n to the length and moves nothing else; after `advance` it only mirrors what the
        device knows already, any number of forwards later.
     7. `rollback(slot, length)` works iff (highest position ever written + 1) - length <= D and the length
        is not below the slot's floor (what it was attached at, or shares with a fork); otherwise
        RollbackError, nothing changed.
     8. A fork continues exactly like its source and neither sees what the other writes afterwards.
     9. `attach(slot, export(other))` continues exactly like `other`; a snapshot that does not fit is refused.
    10. `components` lists every tensor with per-slot or per-page content; reset, fork, export and attach go through it.
    11. Distinct (slot, position) pairs that are live together never share a row, and every row is reachable.
    12. A failing call raises from dsv4.errors and changes nothing.
    """

    config_type: ClassVar[type[PoolConfig]]

    config: PoolConfig
    model: ModelConfig
    geometry: PoolGeometry
    device: torch.device
    lengths: Tensor
    """[max_requests] int32 on the device: committed tokens per slot. `fill` reads it."""
    block_table: Tensor
    """[max_requests, pages_per_slot] int32 on the device: page of each logical page, -1 = none."""
    last_streams: Tensor | None
    """[max_requests, hc_mult * hidden_size] fp32, the residual streams of each slot's last token: what a draft
    layer continues from. Whoever drafts writes it; the pool keeps, forks and exports it. None if the model has no
    draft layer."""

    @classmethod
    @abstractmethod
    def builder_class(cls) -> type[MetadataBuilder]:
        """The metadata builder that speaks this family's addresses."""

    @classmethod
    @abstractmethod
    def estimate(cls, config: PoolConfig, model: ModelConfig) -> MemoryReport:
        """Bytes of every component, per token and per slot."""

    @classmethod
    @abstractmethod
    def geometry_of(cls, config: PoolConfig, model: ModelConfig) -> PoolGeometry:
        """The geometry that a pool of this config has; allocates nothing."""

    @abstractmethod
    def __init__(
        self,
        config: PoolConfig,
        model: ModelConfig,
        device: torch.device | str = "cpu",
        storage: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Allocate uninitialised, or adopt `storage` (component name -> tensor of the estimated size)."""

    # request life, on the host

    @abstractmethod
    def acquire(self) -> int: ...

    @abstractmethod
    def reserve(self, slot: int, total_tokens: int) -> None: ...

    @abstractmethod
    def release(self, slot: int) -> None: ...

    @abstractmethod
    def fork(self, src: int) -> int: ...

    @abstractmethod
    def export(self, slot: int) -> Snapshot: ...

    @abstractmethod
    def attach(self, slot: int, snapshot: Snapshot) -> None: ...

    @abstractmethod
    def drop(self, snapshot: Snapshot) -> None: ...

    @abstractmethod
    def begin_forward(self, slots: Sequence[int], query_lengths: Sequence[int]) -> None:
        """Record that positions [length, length + n) of each slot may be written.

        Slots of -1 and lengths of 0 are skipped. Raises SlotError before anything is recorded: for a slot that
        is not live or is given twice, for a range beyond its reservation, and for a slot whose last forward
        wrote more than D tokens that were never committed (its rings have moved on).
        """

    @abstractmethod
    def advance(
        self, slots_B: Tensor, accepted_B: Tensor, query_lengths: Mapping[int, int]
    ) -> None:
        """Add accepted tokens to `lengths` on the device, without asking it: int [B] each, slot -1 = none.

        `query_lengths`: what the host knows, tokens of each live slot in the forward that this settles. Its commits
        follow later, in order, one per slot: an idle slot (0 tokens) commits 0. That one may be left out unless the
        slot's next forward accepts 0 tokens, for its commit of 0 would be taken for the idle one.
        """

    @abstractmethod
    def lead(self, slot: int) -> int:
        """Most tokens that the device's length is ahead of the host's."""

    @abstractmethod
    def commit(self, slot: int, num_tokens: int) -> None: ...

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None: ...

    @abstractmethod
    def length(self, slot: int) -> int:
        """Committed tokens of a live slot, from the host's books."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Host counter that moves whenever a slot, a length or a block table changes."""

    @property
    @abstractmethod
    def num_free_slots(self) -> int: ...

    @property
    @abstractmethod
    def num_free_pages(self) -> int: ...

    # device side

    @abstractmethod
    def view(self, layer: int, region: Region) -> KVView: ...

    @abstractmethod
    def components(self) -> tuple[Component, ...]: ...
