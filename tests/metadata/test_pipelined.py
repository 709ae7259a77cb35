"""Host books that are some forwards behind the device: lengths, shapes, margins and refusals stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.errors import RollbackError, SlotError


@pytest.fixture(params=[dsv4.UnifiedPoolConfig, dsv4.ThreePoolConfig])
def backend(request: pytest.FixtureRequest, golden: Path) -> dsv4.Backend:
    model = dsv4.ModelConfig.from_json(golden / "tiny" / "config.json")
    pool = request.param(max_requests=2, max_context=96, in_place_tokens=3)
    return dsv4.Backend.create(model, pool)


def begin(backend: dsv4.Backend, slot: int, num_tokens: int) -> list[int]:
    """prepare and fill; the positions of the forward."""
    batch = dsv4.ForwardBatch.of([(slot, [5] * num_tokens)])
    backend.builder.prepare(batch)
    backend.builder.fill()
    return [int(p) for p in backend.builder.metadata.positions_T]


def live_slot(backend: dsv4.Backend) -> int:
    slot = backend.pool.acquire()
    backend.pool.reserve(slot, 96)
    return slot


def test_commits_two_forwards_behind_leave_the_device_where_it_is(backend):
    pool, slot = backend.pool, live_slot(backend)
    assert begin(backend, slot, 3) == [0, 1, 2]
    backend.builder.advance(torch.tensor([3]))
    assert begin(backend, slot, 3) == [3, 4, 5]
    backend.builder.advance(torch.tensor([2]))
    pool.commit(slot, 3)
    assert (pool.length(slot), pool.lead(slot), int(pool.lengths[slot])) == (3, 3, 5)
    assert begin(backend, slot, 3) == [5, 6, 7]
    pool.commit(slot, 2)
    assert (pool.length(slot), pool.lead(slot), int(pool.lengths[slot])) == (5, 0, 5)
    pool.commit(slot, 1)
    assert (pool.length(slot), int(pool.lengths[slot])) == (6, 6)


def test_a_shape_bounds_every_length_that_the_device_may_have(backend):
    slot = live_slot(backend)
    begin(backend, slot, 3)
    backend.builder.advance(torch.tensor([3]))
    begin(backend, slot, 3)
    shape = backend.builder.metadata.shape
    # 3 committed by the device, 3 new: window 0 of ratio 4 closes, and the host cannot know
    assert shape.max_length >= 6
    assert shape.max_closing(4) >= 1
    assert int((backend.builder.metadata.shared.num_visible[4] > 0).sum()) == 3


def test_a_forward_whose_tokens_were_all_rejected_blocks_nothing(backend):
    pool, slot = backend.pool, live_slot(backend)
    begin(backend, slot, 1)
    backend.builder.advance(torch.tensor([0]))
    begin(backend, slot, 1)
    pool.commit(slot, 0)
    assert begin(backend, slot, 1) == [0]
    assert int(pool.lengths[slot]) == 0


@pytest.mark.parametrize("commit_idle", [True, False])
def test_a_commit_of_nothing_for_an_idle_slot_settles_no_other_forward(backend, commit_idle):
    """A host that walks over a batch commits 0 tokens for its idle requests, or leaves them out."""
    pool, slot, other = backend.pool, live_slot(backend), live_slot(backend)
    for count in (0, 2, 0, 1):
        batch = dsv4.ForwardBatch.of([(other, [5]), (slot, [5] * count)])
        backend.builder.prepare(batch)
        backend.builder.fill()
        backend.builder.advance(torch.tensor([1, count]))
    for count, length, lead in ((0, 0, 3), (2, 2, 1), (0, 2, 1), (1, 3, 0)):
        if count or commit_idle:
            pool.commit(slot, count)
        pool.commit(other, 1)
        assert (pool.length(slot), pool.lead(slot), int(pool.lengths[slot])) == (length, lead, 3)
    pool.rollback(slot, 2)
    assert begin(backend, slot, 1) == [2]
    pool.commit(slot, 1)
    assert (pool.length(slot), int(pool.lengths[slot])) == (3, 3)


def test_a_host_that_keeps_fewer_tokens_than_the_device_decides(backend):
    pool, slot = backend.pool, live_slot(backend)
    begin(backend, slot, 3)
    backend.builder.advance(torch.tensor([3]))
    pool.commit(slot, 1)
    assert int(pool.lengths[slot]) == 1
    assert begin(backend, slot, 1) == [1]


def test_one_commit_can_settle_several_forwards(backend):
    pool, slot = backend.pool, live_slot(backend)
    for _ in range(3):
        begin(backend, slot, 1)
        backend.builder.advance(torch.tensor([1]))
    pool.commit(slot, 3)
    assert (pool.length(slot), pool.lead(slot), int(pool.lengths[slot])) == (3, 0, 3)
    assert begin(backend, slot, 1) == [3]


def test_a_commit_accepts_no_more_than_its_own_forward_had(backend):
    pool, slot = backend.pool, live_slot(backend)
    begin(backend, slot, 2)
    backend.builder.advance(torch.tensor([2]))
    begin(backend, slot, 3)
    with pytest.raises(SlotError, match=r"0\.\.2"):
        pool.commit(slot, 3)
    assert (pool.length(slot), pool.lead(slot)) == (0, 2)


@pytest.mark.parametrize("call", ["rollback", "fork", "export"])
def test_what_needs_the_exact_length_waits_for_the_commits(backend, call):
    pool, slot = backend.pool, live_slot(backend)
    begin(backend, slot, 2)
    backend.builder.advance(torch.tensor([2]))
    arguments = (slot, 0) if call == "rollback" else (slot,)
    with pytest.raises((SlotError, RollbackError), match="ahead"):
        getattr(pool, call)(*arguments)
    pool.commit(slot, 2)
    getattr(pool, call)(*arguments)


def test_the_rollback_margin_counts_what_rejected_drafts_have_written(backend):
    pool, slot = backend.pool, live_slot(backend)
    for _ in range(2):
        begin(backend, slot, 3)
        backend.builder.advance(torch.tensor([1]))
    pool.commit(slot, 1)
    pool.commit(slot, 1)
    # written up to position 3 by the second forward, so D = 3 reaches back to length 1
    with pytest.raises(RollbackError):
        pool.rollback(slot, 0)
    pool.rollback(slot, 1)
    assert int(pool.lengths[slot]) == 1


def test_the_stored_swa_loc_is_taken_though_other_slots_moved(backend):
    pool, slot, other = backend.pool, live_slot(backend), live_slot(backend)
    batch = dsv4.ForwardBatch.of([(slot, [5, 6])])
    backend.builder.prepare(batch)
    backend.builder.fill()
    pool.release(other)
    assert backend.builder.swa_loc_for(batch) is backend.builder.metadata.swa_loc_T
    pool.commit(slot, 2)
    assert backend.builder.swa_loc_for(batch) is not backend.builder.metadata.swa_loc_T


def test_a_slot_that_the_pool_has_not_is_refused_by_swa_loc_for(backend):
    with pytest.raises(SlotError, match="7"):
        backend.builder.swa_loc_for(dsv4.ForwardBatch.of([(7, [1])]))
