"""Conformance of a KVPool: one test per promise of `dsv4.pool.base.KVPool`, in the promise's words."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import registry
from dsv4.config import PoolConfig
from dsv4.errors import Dsv4Error, PoolExhaustedError, SlotError
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import Component
from dsv4.testing.memory import differing, pool_bytes
from dsv4.testing.models import CSA, HCA, SLIDING, pool_config, small_model
from dsv4.testing.pool_history import PoolHistory
from dsv4.testing.pool_setup import MakePlayer, refused, some_ids


class AllocationLog(TorchDispatchMode):
    """Remembers the tensors that torch operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._made.append(weakref.ref(result))
        return result

    @property
    def calls(self) -> int:
        return len(self._made)

    def nbytes_alive(self) -> int:
        """Bytes of all storages that are still held."""
        gc.collect()
        alive = [tensor for made in self._made if (tensor := made()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        return sum(storages.values())


class KVPoolConformance(PoolHistory):
    """Subclass, give the fixture `pool_config_type`, and every numbered promise is tested.

        class TestMyPool(KVPoolConformance):
            @pytest.fixture
            def pool_config_type(self):
                return MyPoolConfig

    Promises 7 to 9, about a sequence's history, are in `PoolHistory`.
    """

    @pytest.mark.parametrize("row_format", ["fp32", "bf16", "fp8"])
    def test_01_nothing_depends_on_the_initial_contents_of_any_tensor(
        self, make: MakePlayer, row_format: str
    ) -> None:
        """1. Every row that a forward may read is the tokens' own, in memory that was NaN, 0x7F and 2^31 - 1."""
        index_format = {"fp8": "fp4"}.get(row_format, row_format)
        player = make(row_format=row_format, index_format=index_format, in_place_tokens=2)
        short, long = player.start(40), player.start(96)
        player.forward({long: some_ids(19), short: some_ids(1)}, padding=3)
        for step, (a, b) in enumerate([(1, 2), (2, 1), (5, 1), (1, 11), (3, 3), (1, 1)]):
            new = {short: some_ids(a, seed=step), long: some_ids(b, seed=step + 50)}
            player.forward(new, padding=step % 3)
        player.forward({long: some_ids(2)}, idle=[short])

    @pytest.mark.parametrize("window", [1, 7, 128])
    def test_01_nothing_depends_on_the_width_of_the_window(
        self, make: MakePlayer, window: int
    ) -> None:
        """1. The same with windows of 1, 7 and 128 rows, ratios that are no powers of two, and a slot that fills up."""
        model = small_model([(CSA, 5), (HCA, 7), (SLIDING, 0)], window=window, drafts=0)
        player = make(model, max_context=70, page_tokens=35, max_requests=2)
        slot = player.start(70)
        player.extend(slot, some_ids(70), step=23)
        other = player.start(40)
        player.extend(other, some_ids(12), step=1)

    def test_02_estimate_equals_the_sum_of_the_bytes_of_all_tensors_and_allocates_nothing(
        self, pool_config_type: type[PoolConfig], device: torch.device
    ) -> None:
        """2. `estimate` equals the sum of the bytes of all tensors that the pool then allocates, and allocates
        nothing."""
        for options in ({}, {"row_format": "fp8", "index_format": "fp4", "num_pages": 5}):
            model = small_model(drafts=len(options) % 2)
            config = pool_config(pool_config_type, model, in_place_tokens=3, **options)  # type: ignore[arg-type]
            pool_class = registry.pool_class(config)
            with AllocationLog() as estimating:
                report = pool_class.estimate(config, model)
            assert estimating.calls == 0, "estimate allocated tensors"
            with AllocationLog() as building:
                pool = pool_class(config, model, device)
            assert report.total == building.nbytes_alive()
            assert dict(report.components) == {c.table: c.nbytes for c in pool.components()}

    def test_03_acquire_returns_a_live_slot_of_length_0_or_raises(self, make: MakePlayer) -> None:
        """3. `acquire` returns a live slot of length 0 or raises PoolExhaustedError."""
        player = make(max_requests=3)
        pool = player.pool
        slots = [pool.acquire() for _ in range(3)]
        assert sorted(slots) == [0, 1, 2]
        assert [pool.length(slot) for slot in slots] == [0, 0, 0]
        assert pool.lengths.tolist() == [0, 0, 0]
        with refused(pool, PoolExhaustedError, slots=slots):
            pool.acquire()
        pool.release(slots[1])
        assert pool.acquire() == slots[1]

    def test_03_slots_are_reused_state_is_not(self, make: MakePlayer) -> None:
        """3. Slots are reused, state is not: a sequence in a used slot reads its own rows alone."""
        player = make(max_requests=2, in_place_tokens=2)
        for life, (length, step) in enumerate([(45, 17), (9, 1), (3, 2), (31, 5), (2, 1)]):
            slot = player.start(length)
            player.extend(slot, some_ids(length, seed=life), step=step)
            player.release(slot)
            if life % 2:
                neighbour = player.start(30)
                player.extend(neighbour, some_ids(8, seed=100 + life), step=3)
                player.release(neighbour)

    def test_04_reserve_makes_positions_addressable_all_or_nothing(self, make: MakePlayer) -> None:
        """4. `reserve(slot, n)` makes positions [0, n) addressable, all or nothing; reserving less is a no-op."""
        player = make(num_pages=5)
        pool, page = player.pool, player.pool.geometry.page_tokens
        a, b = player.start(3 * page), player.start(1)
        assert pool.num_free_pages == 1
        with refused(pool, PoolExhaustedError, slots=[a, b]):
            pool.reserve(b, 2 * page + 1)
        with refused(pool, SlotError, slots=[a, b]):
            pool.reserve(b, pool.config.max_context + 1)
        version, table = pool.version, pool.block_table.clone()
        pool.reserve(a, 2)
        assert (pool.num_free_pages, pool.version) == (1, version)
        assert torch.equal(pool.block_table, table)
        player.forward({a: some_ids(3 * page), b: some_ids(1)})
        pool.reserve(b, 2 * page)
        assert pool.num_free_pages == 0
        player.extend(b, some_ids(2 * page - 1, seed=1), step=page - 1)
        with refused(pool, SlotError, slots=[a, b]):
            player.builder.prepare(ForwardBatch.of([(b, [1])]))

    def test_05_release_returns_the_slot_and_exactly_its_unshared_pages(
        self, make: MakePlayer
    ) -> None:
        """5. `release` returns the slot and exactly its unshared pages."""
        player = make(num_pages=9)
        pool, page = player.pool, player.pool.geometry.page_tokens
        source = player.start(3 * page)
        player.extend(source, some_ids(2 * page + 1))
        fork = player.fork(source)
        # two full pages are shared, the third is copied
        assert (pool.num_free_slots, pool.num_free_pages) == (2, 5)
        player.release(source)
        assert (pool.num_free_slots, pool.num_free_pages) == (3, 6)
        player.extend(fork, some_ids(1, seed=1))
        player.release(fork)
        assert (pool.num_free_slots, pool.num_free_pages) == (4, 9)
        with refused(pool, SlotError):
            pool.release(fork)

    def test_06_commit_adds_to_the_length_and_moves_nothing_else(self, make: MakePlayer) -> None:
        """6. `commit(slot, n)` adds n to the length and moves nothing else."""
        player = make(in_place_tokens=3)
        pool = player.pool
        slot, other = player.start(40), player.start(40)
        player.extend(other, some_ids(11))
        player.forward({slot: some_ids(3)}, commit=False)
        before, free = pool_bytes(pool), (pool.num_free_slots, pool.num_free_pages)
        player.commit(slot, some_ids(3)[:2])
        tables = {part.table for part in pool.components() if part.name == "lengths"}
        assert set(differing(before, pool_bytes(pool))) <= tables
        assert (pool.length(slot), pool.length(other)) == (2, 11)
        assert pool.lengths[[slot, other]].tolist() == [2, 11]
        assert (pool.num_free_slots, pool.num_free_pages) == free
        player.extend(slot, some_ids(20, seed=3), step=3)

    def test_10_components_lists_every_tensor_with_per_slot_or_per_page_content(
        self, make: MakePlayer
    ) -> None:
        """10. A forward of one slot changes no byte outside the rows that `components` gives to it and to its pages."""
        player = make(in_place_tokens=2)
        pool = player.pool
        slot, other = player.start(40), player.start(40)
        player.extend(other, some_ids(13), step=4)
        before = {part.name: _rows(part) for part in pool.components()}
        player.extend(slot, some_ids(29), step=9)
        pages = [page for page in pool.block_table[slot].tolist() if page >= 0]
        for part in pool.components():
            own = {*part.rows_of_slot(slot), *(r for p in pages for r in part.rows_of_page(p))}
            pairs = zip(before[part.name], _rows(part), strict=True)
            changed = {row for row, (a, b) in enumerate(pairs) if not torch.equal(a, b)}
            shared = {r for c in pool.components() if c.table == part.table and c is not part
                      for r in [*c.rows_of_slot(slot), *(r for p in pages for r in c.rows_of_page(p))]}  # fmt: skip
            assert changed <= own | shared, f"{part.name}: rows {changed - own} are not the slot's"

    def test_10_snapshots_are_made_of_components(self, make: MakePlayer) -> None:
        """10. Export and attach go through `components`: a snapshot names them, and every name is registered once."""
        player = make()
        slot = player.start(40)
        player.extend(slot, some_ids(29), step=7)
        names = [part.name for part in player.pool.components()]
        assert len(set(names)) == len(names)
        snapshot = player.pool.export(slot)
        assert snapshot.tensors
        assert set(snapshot.tensors) <= set(names)
        for part in player.pool.components():
            assert part.data_ptr == part.storage.data_ptr()
            assert part.strides == tuple(part.storage.stride())

    @pytest.mark.parametrize("in_place_tokens", [1, 5, 12])
    def test_11_distinct_pairs_that_are_live_together_never_share_a_row(
        self, make: MakePlayer, in_place_tokens: int
    ) -> None:
        """11. Distinct (slot, position) pairs that are live together never share a row: full slots, all at once."""
        player = make(max_requests=3, max_context=48, in_place_tokens=in_place_tokens)
        slots = [player.start(48) for _ in range(3)]
        for first in range(0, 48, 16):
            player.forward({s: some_ids(16, seed=100 * s + first) for s in reversed(slots)})
        for slot in slots:
            player.rollback(slot, 48 - in_place_tokens)
        player.forward({s: some_ids(in_place_tokens, seed=s) for s in slots})

    def test_11_every_row_is_reachable(self, make: MakePlayer) -> None:
        """11. The rows of slots and pages cover every table exactly, without overlap."""
        player = make(row_format="fp32", index_format="fp32", in_place_tokens=3)
        geometry = player.pool.geometry
        covered: dict[str, list[int]] = {}
        for part in player.pool.components():
            for slot in range(geometry.max_requests):
                covered.setdefault(part.table, []).extend(part.rows_of_slot(slot))
            for page in range(geometry.num_pages):
                covered[part.table].extend(part.rows_of_page(page))
        for part in player.pool.components():
            assert sorted(covered[part.table]) == list(range(part.storage.shape[0])), part.table

    def test_12_a_failing_call_raises_from_dsv4_errors_and_changes_nothing(
        self, make: MakePlayer
    ) -> None:
        """12. A failing call raises from dsv4.errors and changes nothing."""
        player = make(max_requests=3, num_pages=3, in_place_tokens=2)
        pool = player.pool
        slot, empty = player.start(20), player.start(1)
        player.extend(slot, some_ids(15), step=5)
        snapshot = pool.export(slot)
        for call in (
            lambda: pool.reserve(2, 1),  # not acquired
            lambda: pool.reserve(-1, 1),
            lambda: pool.reserve(99, 1),
            lambda: pool.release(2),
            lambda: pool.commit(slot, 1),  # nothing begun
            lambda: pool.commit(slot, -1),
            lambda: pool.rollback(slot, 16),  # beyond the length
            lambda: pool.rollback(slot, -1),
            lambda: pool.export(-1),
            lambda: pool.length(2),
            lambda: pool.attach(empty, snapshot),  # not reserved
            lambda: pool.attach(slot, snapshot),  # not empty
            lambda: pool.begin_forward([slot, 2], [1, 1]),
            lambda: pool.begin_forward([slot, slot], [1, 1]),
            lambda: pool.begin_forward([slot], [99]),
        ):
            with refused(pool, Dsv4Error, slots=[slot, empty]):
                call()
        assert pool.acquire() == 2
        with refused(pool, PoolExhaustedError, slots=[slot, empty]):
            pool.fork(slot)
        player.extend(slot, some_ids(2, seed=1), step=1)


def _rows(part: Component) -> Tensor:
    """The bytes of every row of the component's table, a row of the result each."""
    if part.format is None:
        return part.storage.clone()
    rows = part.storage.shape[0] * part.format.plane_rows
    every = torch.arange(rows, device=part.storage.device)
    encoded = part.format.export_rows(part.storage, every)
    return encoded.contiguous().view(torch.uint8)
