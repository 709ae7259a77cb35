"""Class X: hours of admitting, aborting and restoring lose no page and no slot."""

from __future__ import annotations

import random

from dsv4.config import PoolConfig
from dsv4.errors import PoolExhaustedError
from dsv4.pool.base import Snapshot
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("X", 81)
def test_ten_thousand_lifecycle_operations_give_every_page_back(family: type[PoolConfig]) -> None:
    """Whatever fails for want of memory leaves slots, pages and books as they were."""
    rng = random.Random(81)
    session = Session(family, slots=5, context=96, num_pages=9)
    pool = session.pool
    live: set[int] = set()
    snapshots: list[Snapshot] = []
    refused = done = 0

    def books() -> tuple[object, ...]:
        lengths = {slot: pool.length(slot) for slot in live}
        return pool.num_free_slots, pool.num_free_pages, lengths, pool.block_table.tolist()

    def admit(total: int) -> int:
        slot = pool.acquire()
        try:
            pool.reserve(slot, total)
        except PoolExhaustedError:
            pool.release(slot)
            raise
        live.add(slot)
        return slot

    def operate(kind: str) -> None:
        if kind == "admit":
            admit(rng.randrange(1, 97))
        elif kind == "restore" and snapshots:
            snapshot = rng.choice(snapshots)
            pool.attach(admit(max(1, snapshot.length)), snapshot)
        elif live:
            slot = rng.choice(sorted(live))
            if kind == "fork":
                live.add(pool.fork(slot))
            elif kind == "save":
                snapshots.append(pool.export(slot))
                del snapshots[:-4]
            elif kind == "grow" and pool.length(slot) < pool._books[slot].reserved:
                pool.begin_forward([slot], [1])
                pool.commit(slot, 1)
            elif kind == "abort":
                pool.release(slot)
                live.discard(slot)

    kinds = ("admit", "grow", "grow", "grow", "fork", "save", "restore", "abort", "abort")
    while done < 10_000:
        done += 1
        before = books()
        try:
            operate(rng.choice(kinds))
        except PoolExhaustedError:
            refused += 1
            assert books() == before
    assert refused > 100
    for slot in live:
        pool.release(slot)
    assert (pool.num_free_slots, pool.num_free_pages) == (5, 9)
    assert (pool.block_table == -1).all()
    assert not pool.lengths.any()
    sequence = truth(64)
    assert_same(session.feed_one(session.open(64), sequence.ids), sequence.logits)
