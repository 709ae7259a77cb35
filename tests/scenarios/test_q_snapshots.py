"""Class Q: a saved sequence goes on exactly, and touches nobody else."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.errors import RollbackError, SnapshotError
from dsv4.model.decoder import Decoder
from dsv4.pool.base import Component
from dsv4.pool.formats import PlainRows
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import FAMILIES, Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


@scenario("Q", 63)
def test_restoring_one_slot_leaves_every_byte_of_the_others(family: type[PoolConfig]) -> None:
    sequence = truth(64)
    session = Session(family)
    slots = session.open_all(3)
    session.feed([(s, sequence.ids[: 17 + 5 * s]) for s in slots])
    saved = session.pool.export(1)
    session.feed_one(1, sequence.wrong(22, 9))
    before = [session.slot_bytes(s) for s in (0, 2)]
    session.pool.release(1)
    assert session.open() == 1
    session.pool.attach(1, saved)
    assert [session.slot_bytes(s) for s in (0, 2)] == before
    logits = session.feed([(s, sequence.ids[17 + 5 * s : 20 + 5 * s]) for s in slots])
    for slot, rows in zip(slots, logits, strict=True):
        assert_same(rows, sequence.logits[17 + 5 * slot : 20 + 5 * slot])


@scenario("Q", 64)
@pytest.mark.parametrize("source", FAMILIES)
@pytest.mark.parametrize(
    ("window", "lengths"),
    [
        (16, (1, 3, 4, 5, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49)),
        (128, (127, 128, 129, 130, 255, 256, 257, 383, 384, 385)),
    ],
)
def test_a_restored_sequence_continues_with_the_bits_of_the_saved_one(
    family: type[PoolConfig], source: type[PoolConfig], window: int, lengths: tuple[int, ...]
) -> None:
    """Also into the other pool family, with another ring (D 3 instead of 1) and other pages."""
    decoder: Decoder = tiny_decoder(sliding_window=window, hca=window)
    ids = truth(64).ids * 7
    saving = Session(source, decoder, context=512, page=window, deterministic=True)
    restoring = Session(family, decoder, context=512, page=2 * window, depth=3, deterministic=True)
    saved, at = saving.open(), 0
    for length in lengths:
        saving.feed_one(saved, ids[at:length])
        at, slot = length, restoring.open()
        snapshot = saving.pool.export(saved)
        restoring.pool.attach(slot, snapshot)
        saving.pool.drop(snapshot)
        fork = saving.pool.fork(saved)
        saving.pool.reserve(fork, 512)
        for end in (length + 1, length + 6):
            rest = ids[saving.pool.length(fork) : end]
            assert torch.equal(restoring.feed_one(slot, rest), saving.feed_one(fork, rest))
        saving.pool.release(fork)
        restoring.pool.release(slot)


@scenario("Q", 65)
def test_a_fork_and_its_source_go_different_ways(family: type[PoolConfig]) -> None:
    """At every phase of both ratios; nothing that one writes reaches the other."""
    sequence = truth(96)
    for length in (1, 2, 3, 4, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        session = Session(family)
        source = session.open()
        session.feed_one(source, sequence.ids[:length])
        fork = session.pool.fork(source)
        session.pool.reserve(fork, 128)
        before = session.slot_bytes(source)
        session.feed_one(fork, sequence.wrong(length, 20))
        assert session.slot_bytes(source) == before
        logits = session.feed_one(source, sequence.ids[length : length + 18])
        assert_same(logits, sequence.logits[length : length + 18])


@scenario("Q", 65)
@pytest.mark.parametrize("length", [29, 30, 31, 32])
def test_a_sequence_is_cut_to_any_length_by_a_snapshot_and_only_by_one(
    family: type[PoolConfig], length: int
) -> None:
    sequence = truth(96)
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:length])
    saved = session.pool.export(slot)
    session.feed_one(slot, sequence.wrong(length, 30))
    with pytest.raises(RollbackError):
        session.pool.rollback(slot, length)
    session.pool.release(slot)
    slot = session.open()
    session.pool.attach(slot, saved)
    logits = session.feed_one(slot, sequence.ids[length : length + 20])
    assert_same(logits, sequence.logits[length : length + 20])


@scenario("Q", 65, 66)
def test_one_table_lists_every_component(family: type[PoolConfig]) -> None:
    pool = Session(family).pool
    names = {c.name for c in pool.components()}
    assert names == {
        "layer0.window", "layer1.window", "layer2.window",
        "layer1.entries", "layer1.index", "layer1.state", "layer1.index_state",
        "layer2.entries", "layer2.state", "layer2.accumulator",
        "lengths", "block_table",
    }  # fmt: skip
    assert {c.table for c in pool.components()} == set(pool.tensors)
    handled = list(itertools.chain.from_iterable(part.components for part in pool._parts))
    assert sorted(c.name for c in handled) == sorted(names)


@scenario("Q", 66)
def test_a_component_that_nobody_exports_stops_the_export(family: type[PoolConfig]) -> None:
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, truth(64).ids[:9])
    extra = Component(
        name="layer1.extra",
        table="layer1.extra",
        layer=1,
        storage=torch.zeros(4, 8),
        format=PlainRows(torch.float32, 8),
        rows_per_slot=1,
    )
    session.pool._components[extra.name] = extra
    with pytest.raises(SnapshotError, match=r"layer1\.extra"):
        session.pool.export(slot)
