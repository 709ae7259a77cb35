"""Promises 7, 8 and 9 of a KVPool: what rollback, fork and attach make of a sequence's history."""

from __future__ import annotations

import attrs
import pytest

from dsv4.errors import RollbackError, SlotError, SnapshotError
from dsv4.pool.base import Snapshot
from dsv4.testing.memory import differing, pool_bytes
from dsv4.testing.models import CSA, HCA, small_model
from dsv4.testing.player import Player
from dsv4.testing.pool_setup import MakePlayer, PoolSetup, refused, some_ids


class PoolHistory(PoolSetup):
    """Part of `KVPoolConformance`."""

    @pytest.mark.parametrize("margin", [1, 2, 5, 12])
    def test_07_rollback_works_iff_within_the_margin(self, make: MakePlayer, margin: int) -> None:
        """7. `rollback(slot, length)` works iff (highest position ever written + 1) - length <= D; otherwise
        RollbackError, nothing changed."""
        player = make(in_place_tokens=margin, max_requests=2)
        pool = player.pool
        slot = player.start(96)
        player.extend(slot, some_ids(20))
        highest = 20
        for step, back in enumerate([1, margin, margin + 1, 0, margin // 2]):
            new = some_ids(margin, seed=step)
            player.extend(slot, new)
            highest = max(highest, pool.length(slot))
            target = pool.length(slot) - back
            if highest - target <= margin:
                player.rollback(slot, target)
                # written once, rolled back, written again with other tokens
                player.extend(slot, some_ids(1, seed=90 + step))
            else:
                with refused(pool, RollbackError, slots=[slot]):
                    pool.rollback(slot, target)
        player.extend(slot, some_ids(9, seed=7), step=2)

    def test_07_the_margin_counts_from_the_highest_position_ever_written(
        self, make: MakePlayer
    ) -> None:
        """7. Rolling back does not renew the margin: it is measured from the highest position ever written."""
        player = make(in_place_tokens=4)
        slot = player.start(60)
        player.extend(slot, some_ids(21))
        player.forward({slot: some_ids(4, seed=1)}, commit=False)  # written up to 25
        player.commit(slot, some_ids(4, seed=1)[:1])
        player.rollback(slot, 21)
        with refused(player.pool, RollbackError, slots=[slot]):
            player.pool.rollback(slot, 20)
        player.extend(slot, some_ids(8, seed=2), step=4)
        player.rollback(slot, 26)
        player.extend(slot, some_ids(10, seed=3), step=1)

    def test_07_every_phase_of_every_window_rolls_back(self, make: MakePlayer) -> None:
        """7. Verify forwards with every number of accepted tokens, at every phase of the compression windows."""
        player = make(in_place_tokens=5, max_requests=1)
        slot, seed = player.start(96), 0
        player.extend(slot, some_ids(3))
        while player.pool.length(slot) < 88:
            drafted = some_ids(5, seed=seed)
            player.forward({slot: drafted}, commit=False)
            player.commit(slot, drafted[: seed % 6])
            seed += 1

    def test_07_nothing_below_the_floor_is_rolled_back(self, make: MakePlayer) -> None:
        """7. The length is not below the slot's floor: what it was attached at, or shares with a fork."""
        player = make(in_place_tokens=6)
        pool = player.pool
        page = pool.geometry.page_tokens
        source = player.start(3 * page)
        player.extend(source, some_ids(page + 2))
        fork = player.fork(source)
        attached = player.start(3 * page)
        pool.attach(attached, pool.export(source))
        player.tokens[attached] = list(player.tokens[source])
        for slot, floor in ((source, page), (fork, page), (attached, page + 2)):
            player.extend(slot, some_ids(1, seed=slot))
            with refused(pool, RollbackError, slots=[slot]):
                pool.rollback(slot, floor - 1)
            player.rollback(slot, floor)
            player.extend(slot, some_ids(4, seed=40 + slot), step=2)

    @pytest.mark.parametrize("length", [0, 1, 11, 12, 24, 31])
    def test_08_a_fork_continues_exactly_like_its_source(
        self, make: MakePlayer, length: int
    ) -> None:
        """8. A fork continues exactly like its source and neither sees what the other writes afterwards."""
        player = make(in_place_tokens=3)
        source = player.start(60)
        player.extend(source, some_ids(length), step=7)
        if length:
            player.forward(
                {source: some_ids(2, seed=1)}, commit=False
            )  # provisional rows may be forked too
        fork = player.fork(source)
        player.pool.reserve(fork, 60)
        player.pool.reserve(source, 60)
        for step in range(4):
            new = {source: some_ids(3, seed=10 + step), fork: some_ids(1 + step, seed=30 + step)}
            player.forward(new)
            player.check_streams(source)
            player.check_streams(fork)
        grandchild = player.fork(fork)
        player.release(source)
        player.pool.reserve(grandchild, 60)
        player.forward({fork: some_ids(2, seed=8), grandchild: some_ids(4, seed=9)})

    def test_08_a_fork_shares_full_pages_and_copies_the_last(self, make: MakePlayer) -> None:
        """8. Full pages are shared between source and fork, the last partial page is copied."""
        player = make()
        pool, page = player.pool, player.pool.geometry.page_tokens
        source = player.start(3 * page)
        player.extend(source, some_ids(2 * page + 5))
        free = pool.num_free_pages
        fork = player.fork(source)
        assert pool.num_free_pages == free - 1
        table = pool.block_table.tolist()
        assert table[fork][:2] == table[source][:2]
        assert table[fork][2] != table[source][2]

    @pytest.mark.parametrize("length", [1, 6, 12, 23, 37])
    def test_09_attach_of_an_export_continues_exactly_like_the_other(
        self, make: MakePlayer, length: int
    ) -> None:
        """9. `attach(slot, export(other))` continues exactly like `other`: in another slot, and in a pool of other
        sizes."""
        player = make(in_place_tokens=3)
        source = player.start(60)
        player.extend(source, some_ids(length), step=5)
        snapshot = player.pool.export(source)
        player.extend(
            source, some_ids(9, seed=1), step=1
        )  # the snapshot shares nothing with its source
        wide = make(in_place_tokens=5, page_tokens=24, max_requests=2)
        for other in (player, wide):
            dirty = other.start(40)
            other.extend(dirty, some_ids(33, seed=2), step=11)
            other.release(dirty)
            slot = _attach(other, snapshot, some_ids(length))
            other.check_streams(slot)
            other.extend(slot, some_ids(8, seed=3), step=1)
            other.extend(slot, some_ids(8, seed=4), step=8)

    def test_09_an_export_is_of_the_committed_length(self, make: MakePlayer) -> None:
        """9. Provisional tokens are not exported, and an export changes nothing."""
        player = make(in_place_tokens=4)
        source = player.start(60)
        player.extend(source, some_ids(17), step=4)
        player.forward({source: some_ids(4, seed=1)}, commit=False)
        before = pool_bytes(player.pool)
        snapshot = player.pool.export(source)
        assert snapshot.length == 17
        assert snapshot.nbytes == sum(
            t.numel() * t.element_size() for t in snapshot.tensors.values()
        )
        assert not differing(before, pool_bytes(player.pool))
        slot = _attach(player, snapshot, some_ids(17))
        player.forward({slot: some_ids(3, seed=2), source: some_ids(2, seed=3)})

    def test_09_a_snapshot_that_does_not_fit_is_refused(self, make: MakePlayer) -> None:
        """9. A snapshot that does not fit is refused: other formats, another model, dropped, a slot in use."""
        player = make()
        source, slot = player.start(40), player.start(40)
        player.extend(source, some_ids(20))
        snapshot = player.pool.export(source)
        strangers = [
            make(row_format="bf16"),
            make(index_format="bf16"),
            make(small_model(window=8)),
            make(small_model([(CSA, 4), (HCA, 6)])),
        ]
        for stranger in strangers:
            theirs = stranger.start(40)
            with refused(stranger.pool, SnapshotError, slots=[theirs]):
                stranger.pool.attach(theirs, snapshot)
        tensors = dict(list(snapshot.tensors.items())[1:])
        with refused(player.pool, SnapshotError, slots=[slot]):
            player.pool.attach(slot, attrs.evolve(snapshot, tensors=tensors))
        with refused(player.pool, SlotError, slots=[slot]):
            player.pool.attach(source, snapshot)
        player.pool.drop(snapshot)
        with refused(player.pool, SnapshotError, slots=[slot]):
            player.pool.attach(slot, snapshot)
        with refused(player.pool, SnapshotError, slots=[slot]):
            player.pool.drop(snapshot)


def _attach(player: Player, snapshot: Snapshot, ids: list[int]) -> int:
    """A new slot that continues from the snapshot of a sequence with these ids."""
    slot = player.start(60)
    player.pool.attach(slot, snapshot)
    player.tokens[slot] = list(ids)
    return slot
