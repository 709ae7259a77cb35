"""Class A: addresses come from the positions of this forward, never from an earlier one."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.errors import StaleMetadataError
from dsv4.metadata.batch import ForwardBatch
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("A", 1)
def test_each_step_of_a_draft_writes_its_own_ring_row(family: type[PoolConfig]) -> None:
    """Three steps of one builder whose lengths advance on the device alone; the host commits at the end."""
    sequence, start, steps = truth(64), (21, 34), 3
    session = Session(family, depth=3)
    slots = session.open_all(2)
    session.feed([(s, sequence.ids[:n]) for s, n in zip(slots, start, strict=True)])
    written: list[list[int]] = []
    for step in range(steps):
        requests = [(s, [sequence.ids[n + step]]) for s, n in zip(slots, start, strict=True)]
        logits = session.forward(requests)
        written.append(session.metadata.swa_loc_T.tolist())
        assert session.builder.computed["swa_loc"] == 1
        for request, n in enumerate(start):
            assert_same(logits[request][0], sequence.logits[n + step])
        session.builder.advance(torch.ones(2, dtype=torch.int32))
    for request, (slot, n) in enumerate(zip(slots, start, strict=True)):
        ring = session.pool.geometry.ring_rows
        expected = [slot * ring + (n + step) % ring for step in range(steps)]
        assert [row[request] for row in written] == expected
        for layer in range(3):
            rows = session.window_rows(slot, layer, range(n, n + steps))
            assert_same(rows, sequence.run.window_kv[layer][n : n + steps])
        session.pool.commit(slot, steps)
        assert session.pool.lengths[slot] == n + steps
    logits = session.forward(
        [(s, [sequence.ids[n + 3]]) for s, n in zip(slots, start, strict=True)]
    )
    assert_same(torch.cat(logits), sequence.logits[[n + 3 for n in start]])


@scenario("A", 2)
def test_a_deeper_draft_after_a_shallow_one_sees_no_address_of_it(family: type[PoolConfig]) -> None:
    sequence, start = truth(64), 30
    session = Session(family, depth=5)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:start])
    shallow = [sequence.ids[start], *sequence.wrong(start + 1, 2)]
    session.verify([(slot, shallow)], [1])
    first_round = session.metadata.swa_loc_T.tolist()
    deep = sequence.ids[start + 1 : start + 6]
    logits = session.verify([(slot, deep)], [5])[0]
    second_round = session.metadata.swa_loc_T.tolist()
    ring = session.pool.geometry.ring_rows
    assert first_round == [slot * ring + p % ring for p in range(start, start + 3)]
    assert second_round == [slot * ring + p % ring for p in range(start + 1, start + 6)]
    assert_same(logits, sequence.logits[start + 1 : start + 6])
    assert_same(session.feed_one(slot, sequence.ids[36:40]), sequence.logits[36:40])


@scenario("A", 1, 2)
def test_a_layer_cannot_read_metadata_of_an_earlier_fill(family: type[PoolConfig]) -> None:
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, truth(64).ids[:5])
    old_epoch = session.metadata.epoch
    kept = session.metadata.for_layer(1, old_epoch)
    session.feed_one(slot, truth(64).ids[5:6])
    with pytest.raises(StaleMetadataError, match="epoch"):
        session.metadata.for_layer(1, old_epoch)
    with pytest.raises(StaleMetadataError, match="epoch"):
        _ = kept.store_loc_T


@scenario("A", 1)
def test_rows_asked_for_after_the_positions_moved_are_the_live_ones(
    family: type[PoolConfig],
) -> None:
    session = Session(family, depth=2)
    slot = session.open()
    session.feed_one(slot, truth(64).ids[:20])
    batch = ForwardBatch.of([(slot, [1])])
    session.run_batch(batch)
    assert session.builder.swa_loc_for(batch).tolist() == [slot * 17 + 20 % 17]
    session.builder.advance(torch.ones(1, dtype=torch.int32))
    assert session.builder.swa_loc_for(batch).tolist() == [slot * 17 + 21 % 17]
