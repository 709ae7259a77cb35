"""Class D, at the level of the pool: a hit is a state import that is exact or refused, whoever found it."""

from __future__ import annotations

import attrs
import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.errors import SlotError, SnapshotError
from dsv4.pool.base import Snapshot
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


@scenario("D", 11)
@pytest.mark.parametrize(("window", "hit"), [(16, 32), (16, 48), (32, 16)])
def test_a_hit_in_a_dirty_slot_continues_like_a_recompute(
    family: type[PoolConfig], window: int, hit: int
) -> None:
    """Page-aligned hits, longer and shorter than the window; the slot's ring is full of another request."""
    decoder = tiny_decoder(sliding_window=window)
    sequence = truth(128, decoder=decoder)
    session = Session(family, decoder, page=16)
    slots = session.open_all(4)
    session.feed_one(0, sequence.ids[:hit])
    found = session.pool.export(0)
    session.feed_one(0, sequence.ids[hit : 3 * window + 5])
    session.feed_one(3, sequence.wrong(0, 61))
    session.pool.release(3)
    assert session.open() == slots[3]
    session.pool.attach(3, found)
    assert_same(session.feed_one(3, sequence.ids[hit : hit + 3]), sequence.logits[hit : hit + 3])
    for at in range(hit + 3, hit + 2 * window):
        assert_same(session.feed_one(3, [sequence.ids[at]])[0], sequence.logits[at])


@scenario("D", 12)
@pytest.mark.parametrize("lost", ["layer0.window", "layer1.state", "layer2.accumulator"])
@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_a_hit_whose_rows_are_not_all_there_is_refused(
    family: type[PoolConfig], lost: str, how: str
) -> None:
    session = Session(family)
    source, target = session.open_all(2)
    session.feed_one(source, truth(64).ids[:35])
    whole = session.pool.export(source)
    tensors = dict(whole.tensors)
    if how == "gone":
        del tensors[lost]
    else:
        tensors[lost] = tensors[lost][1:]
    before = session.memory()
    with pytest.raises(SnapshotError, match=lost):
        session.pool.attach(target, attrs.evolve(whole, tensors=tensors))
    assert session.memory() == before
    assert session.pool.length(target) == 0


@scenario("D", 12)
def test_a_tail_of_one_window_recomputed_without_the_rest_is_not_exact(
    family: type[PoolConfig],
) -> None:
    """Why a hit without its window rows is refused: each layer looks one window further back."""
    sequence = truth(128)
    session = Session(family)
    slot = session.open()
    tail = session.feed_one(slot, sequence.ids[112:])
    assert (tail[-1] - sequence.logits[-1]).abs().max() > 1e-3


@scenario("D", 14)
def test_any_index_may_find_the_hit_because_the_pool_decides(family: type[PoolConfig]) -> None:
    """The index is a dict that answers wrongly: other model, other formats, dropped, too long, used slot."""
    sequence = truth(64)
    session = Session(family)
    other_model = Session(family, tiny_decoder(sliding_window=32))
    other_rows = Session(family, row_format="bf16")
    index: dict[str, Snapshot] = {}
    for name, saving in (("good", session), ("model", other_model), ("rows", other_rows)):
        slot = saving.open()
        saving.feed_one(slot, sequence.ids[:20])
        index[name] = saving.pool.export(slot)
    index["dropped"] = session.pool.export(0)
    session.pool.drop(index["dropped"])
    target, short = session.open(24), session.pool.acquire()
    before = session.memory()
    for name in ("model", "rows", "dropped"):
        with pytest.raises(SnapshotError):
            session.pool.attach(target, index[name])
    with pytest.raises(SlotError, match="empty slot"):
        session.pool.attach(0, index["good"])
    with pytest.raises(SlotError, match="reserve"):
        session.pool.attach(short, index["good"])
    assert session.memory() == before
    session.pool.attach(target, index["good"])
    assert_same(session.feed_one(target, sequence.ids[20:24]), sequence.logits[20:24])


@scenario("D", 11)
def test_a_hit_has_the_bits_of_the_run_that_was_saved(family: type[PoolConfig]) -> None:
    ids = truth(64).ids
    session = Session(family, deterministic=True)
    saved, hit = session.open_all(2)
    session.feed_one(saved, ids[:32])
    session.pool.attach(hit, session.pool.export(saved))
    for at in range(32, 52):
        together = session.feed([(saved, [ids[at]]), (hit, [ids[at]])])
        assert torch.equal(*together)
