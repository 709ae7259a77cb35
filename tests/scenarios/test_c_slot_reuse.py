"""Class C: what a slot or page held before, and what its neighbours do, never shows."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4.config import PoolConfig
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("C", 6)
def test_forks_diverge_without_seeing_each_other(family: type[PoolConfig]) -> None:
    """Fork at length 10 (two tokens into a window of four), six interleaved steps; then a new prompt of two tokens."""
    first = truth(64)
    session = Session(family)
    source = session.open()
    session.feed_one(source, first.ids[:10])
    fork = session.pool.fork(source)
    session.pool.reserve(fork, 64)
    other_ids = (*first.ids[:10], *first.wrong(10, 6))
    expected = expected_logits(other_ids)
    for at in range(10, 16):
        requests = [(source, first.ids[at : at + 1]), (fork, other_ids[at : at + 1])]
        mine, theirs = session.feed(requests)
        assert_same(mine[0], first.logits[at])
        assert_same(theirs[0], expected[at])
    session.pool.release(source)
    fresh = session.open()
    assert fresh == source
    second = truth(64, seed=5)
    assert_same(session.feed_one(fresh, second.ids[:2]), second.logits[:2])
    mine, theirs = session.feed([(fresh, second.ids[2:8]), (fork, [1])])
    assert_same(mine, second.logits[2:8])
    assert_same(theirs, expected_logits((*other_ids, 1))[16:])


def expected_logits(ids: tuple[int, ...]) -> torch.Tensor:
    from tests.scenarios.reference import Reference
    from tests.scenarios.weights import tiny_decoder, weights_of

    decoder = tiny_decoder()
    return Reference(decoder.config, weights_of(decoder)).run(ids).logits


@scenario("C", 7)
@pytest.mark.parametrize("ratio", [4, 16])
def test_a_reused_slot_counts_its_own_entries_from_zero(
    family: type[PoolConfig], ratio: int
) -> None:
    old, new = truth(64), truth(64, seed=6)
    session = Session(family, slots=1)
    for length, visible in ((1, 0), (ratio - 1, 0), (ratio, 1)):
        slot = session.open()
        session.feed_one(slot, old.ids[: 3 * ratio])
        session.pool.release(slot)
        assert session.open() == slot
        logits = session.feed_one(slot, new.ids[:length])
        assert session.metadata.shared.num_visible[ratio].tolist()[-1] == visible
        fresh = Session(family, slots=1)
        assert torch.equal(logits, fresh.feed_one(fresh.open(), new.ids[:length]))
        assert_same(logits, new.logits[:length])
        session.pool.release(slot)


@scenario("C", 8)
def test_two_hundred_requests_through_six_slots_all_equal_a_recompute(
    family: type[PoolConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released rows and pages are overwritten with NaN (the pool's own checking); pages are scarce."""
    monkeypatch.setenv("DSV4_CHECK", "1")
    rng = random.Random(8)
    sequences = [truth(96, seed=seed) for seed in range(10, 16)]
    session = Session(family, slots=6, context=96, num_pages=14)
    live: dict[int, tuple[int, int, int]] = {}
    admitted = finished = 0
    while finished < 200:
        while admitted < 200 and session.pool.num_free_slots:
            total = rng.choice([1, 2, 3, 5, 15, 16, 17, 33, 40])
            if -(-total // 32) > session.pool.num_free_pages:
                break
            live[session.open(total)] = (rng.randrange(6), 0, total)
            admitted += 1
        batch = []
        for slot, (which, at, total) in live.items():
            count = min(total - at, rng.choice([1, 1, 7, 40]))
            batch.append((slot, sequences[which].ids[at : at + count]))
        rng.shuffle(batch)
        for (slot, ids), logits in zip(batch, session.feed(batch), strict=True):
            which, at, total = live[slot]
            assert_same(logits, sequences[which].logits[at : at + len(ids)])
            live[slot] = (which, at + len(ids), total)
            if at + len(ids) == total:
                session.pool.release(slot)
                del live[slot]
                finished += 1
    assert session.pool.num_free_pages == 14
    assert session.pool.num_free_slots == 6
    session.assert_guards_intact()


@scenario("C", 9)
def test_the_third_run_of_a_request_has_the_bits_of_the_first(family: type[PoolConfig]) -> None:
    wanted, other = truth(64), truth(64, seed=5)
    session = Session(family, deterministic=True)
    runs = []
    for disturbed in (False, False, True):
        slot, neighbour = session.open(), session.open()
        if disturbed:
            session.feed_one(neighbour, other.ids[:13])
        pieces = [session.feed_one(slot, wanted.ids[:20])]
        for at in range(20, 30):
            batch = [(slot, wanted.ids[at : at + 1])]
            if disturbed:
                batch.insert(0, (neighbour, other.ids[at : at + 1]))
            pieces.append(session.feed(batch)[-1])
        runs.append(torch.cat(pieces))
        session.pool.release(slot)
        session.pool.release(neighbour)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert_same(runs[0], wanted.logits[:30])


@scenario("C", 10)
def test_resetting_one_slot_leaves_every_byte_of_the_other(family: type[PoolConfig]) -> None:
    session, sequence = Session(family), truth(64)
    kept, reset = session.open_all(2)
    session.feed([(kept, sequence.ids[:23]), (reset, sequence.ids[:37])])
    before = session.slot_bytes(kept)
    session.pool.release(reset)
    assert session.open() == reset
    assert session.slot_bytes(kept) == before
    assert int(session.pool.lengths[reset]) == 0
    mine, theirs = session.feed([(kept, sequence.ids[23:24]), (reset, sequence.ids[:1])])
    assert_same(mine, sequence.logits[23:24])
    assert_same(theirs, sequence.logits[:1])


@scenario("C", 10)
def test_a_token_of_one_slot_changes_no_byte_of_another(family: type[PoolConfig]) -> None:
    session, sequence = Session(family), truth(64)
    quiet, busy = session.open_all(2)
    session.feed([(quiet, sequence.ids[:30]), (busy, sequence.ids[:30])])
    before = session.slot_bytes(quiet)
    for at in range(30, 50):
        session.feed([(busy, sequence.ids[at : at + 1])])
    assert session.slot_bytes(quiet) == before
