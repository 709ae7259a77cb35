"""Class H: a batch padded to a bucket gives what it gives alone; widths and plans follow from capacities.

The parts that need a captured graph are named in test_table.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.config import BackendConfig, PoolConfig, UnifiedPoolConfig
from dsv4.errors import BatchError, ConfigError
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.plans import FoldPlan
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("H", 26)
def test_lengths_that_change_places_between_two_forwards_keep_their_own_rows(
    family: type[PoolConfig],
) -> None:
    """The builder that planned (300, 20, 9) plans (9, 300, 20) next."""
    sequence = truth(320, seed=30)
    session = Session(family, slots=6, context=320)
    first, second = session.open_all(3), session.open_all(3)
    for slots, lengths in ((first, (300, 20, 9)), (second, (9, 300, 20))):
        session.feed([(s, sequence.ids[:n]) for s, n in zip(slots, lengths, strict=True)])
    for _ in range(2):
        for slots in (first, second):
            at = [session.pool.length(slot) for slot in slots]
            logits = session.feed([(s, [sequence.ids[n]]) for s, n in zip(slots, at, strict=True)])
            assert_same(torch.cat(logits), sequence.logits[at])


@scenario("H", 27)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (3, 2), (5,), (1, 4)])
def test_five_tokens_in_a_bucket_of_eight_equal_five_tokens(
    family: type[PoolConfig], shape: tuple[int, ...]
) -> None:
    """In place and as chunks; attention of the padding is exactly zero."""
    sequence = truth(64)
    outs: list[Tensor] = []

    def probe(name: str, layer: int, value: Tensor) -> None:
        if name == "attn_out":
            outs.append(value)

    results = []
    for pads in (0, 3):
        session = Session(family, slots=8, deterministic=True, depth=2)
        slots = session.open_all(len(shape))
        session.feed([(s, sequence.ids[: 6 + s]) for s in slots])
        requests = [(s, sequence.ids[6 + s : 6 + s + n]) for s, n in zip(slots, shape, strict=True)]
        outs.clear()
        logits = session.feed(requests, pad_tokens=pads, pad_requests=pads, probe=probe)
        results.append(torch.cat(logits))
        for out in outs:
            assert not out[5:].any()
        for (slot, ids), rows in zip(requests, logits, strict=True):
            assert_same(rows, sequence.logits[6 + slot : 6 + slot + len(ids)])
        session.assert_guards_intact()
    assert torch.equal(*results)


@scenario("H", 28)
def test_padding_tokens_belong_to_the_sentinel_behind_the_last_request(
    family: type[PoolConfig],
) -> None:
    sequence = truth(64)
    session = Session(family, slots=3)
    slots = session.open_all(3)
    session.feed([(slot, sequence.ids[:20]) for slot in slots])
    batch = ForwardBatch.of([(slot, [sequence.ids[20]]) for slot in slots]).padded(num_tokens=8)
    session.run_batch(batch)
    shared = session.metadata.shared
    assert shared.request_T.tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert shared.slot_T.tolist() == [*slots, -1, -1, -1, -1, -1]
    for visible in shared.num_visible.values():
        assert visible.tolist()[3:] == [0] * 5
    for stream in (shared.window_stream, *shared.entry_streams.values()):
        sizes = stream.indptr_T1.diff().tolist()
        assert sizes[3:] == [0] * 5
        assert (stream.indices_N[sum(sizes) :] == -1).all()
    for loc in (shared.swa_loc_T, shared.store_loc_T):
        assert loc.tolist()[3:] == [-1] * 5
    session.assert_guards_intact()


@scenario("H", 29)
@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 127, 128, 129, 4096, 2**20])
def test_widths_are_those_of_the_capacity_at_every_context(
    family: type[PoolConfig], context: int
) -> None:
    """A backend of any max_context can be planned and decodes; its buffers are sized by max_context // ratio."""
    sequence = truth(64)
    session = Session(family, slots=2, context=context, num_pages=4, max_tokens=20)
    buffers = session.builder._buffers.tensors
    assert buffers["entries.4.8.indices"].numel() == 20 * min(8, context // 4)
    assert buffers["entries.16.0.indices"].numel() == 20 * (context // 16)
    assert buffers["window.indices"].numel() == 20 * min(16, context)
    slot, count = session.open(min(context, 40)), min(context, 18)
    assert_same(session.feed_one(slot, sequence.ids[:count]), sequence.logits[:count])
    for at in range(count, min(context, 22)):
        assert_same(session.feed_one(slot, [sequence.ids[at]])[0], sequence.logits[at])
    for bucket in (1, 2, 7, 20):
        idle = ForwardBatch(slots=(-1,), query_lengths=(0,), token_ids=(), num_tokens=bucket)
        assert session.run_batch(idle).isfinite().all()


@scenario("H", 31)
def test_a_small_prefill_in_a_large_bucket_plans_nothing_behind_its_requests(
    family: type[PoolConfig],
) -> None:
    sequence = truth(64)
    session = Session(family)
    slots = session.open_all(2)
    batch = ForwardBatch.of([(slot, sequence.ids[:6]) for slot in slots]).padded(num_tokens=64)
    logits = session.run_batch(batch)
    assert_same(logits[:6], sequence.logits[:6])
    assert_same(logits[6:12], sequence.logits[:6])
    shared = session.metadata.shared
    # 6 tokens close one window of four per request, and none of sixteen
    assert (shared.entry_locs[4] >= 0).nonzero().flatten().tolist() == [0, 1]
    assert (shared.index_locs[4] >= 0).nonzero().flatten().tolist() == [0, 1]
    assert (shared.entry_locs[16] == -1).all()
    assert (shared.request_T[12:] == 2).all()
    for plan in shared.state_plans.values():
        assert (plan.state_loc_T[12:] == -1).all()
        if isinstance(plan, FoldPlan):
            assert plan.accumulator_loc_B.tolist() == slots
            assert (plan.source_SJ[:-2] == -1).all()
        else:
            assert (plan.source_EM[2:] == -1).all()


@scenario("H", 32)
def test_a_pool_or_plan_of_nothing_is_refused_before_anything_runs() -> None:
    for wrong in ({"max_requests": 0}, {"max_context": 0}, {"num_pages": 0}):
        sizes = {"max_requests": 2, "max_context": 32} | wrong
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            UnifiedPoolConfig(**sizes)
    pool = UnifiedPoolConfig(max_requests=1, max_context=32)
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        BackendConfig(pool=pool, max_batch_tokens=0)
    session = Session(UnifiedPoolConfig)
    with pytest.raises(BatchError, match="prepare"):
        session.builder.fill()
