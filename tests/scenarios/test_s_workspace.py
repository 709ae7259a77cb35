"""Class S: scratch has a declared size that neither chunk nor context can exceed."""

from __future__ import annotations

import pytest
import torch

from dsv4.backend import Backend
from dsv4.config import BackendConfig, PoolConfig
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


@scenario("S", 69)
@pytest.mark.parametrize("context", [256, 2**20])
def test_index_scores_of_a_large_chunk_keep_the_byte_budget(
    family: type[PoolConfig], context: int
) -> None:
    """4096 tokens times 256 K entries would be 4 GiB."""
    model, budget = tiny_decoder().config, 256 * 2**20
    pool = family(max_requests=1, max_context=context, page_tokens=32)
    config = BackendConfig(pool=pool, max_batch_tokens=4096, score_budget_bytes=budget)
    scratch = Backend.estimate(model, config).components["workspace.scores"]
    assert scratch <= budget
    assert scratch == min(budget, 4096 * (context // 4) * 4)


@scenario("S", 69)
def test_a_prefill_in_score_tiles_has_the_bits_of_one_in_one_piece(
    family: type[PoolConfig],
) -> None:
    sequence, results = truth(128), []
    for budget in (4, 300, 2**20):
        session = Session(family, score_budget_bytes=budget, deterministic=True)
        slots = session.open_all(2)
        requests = [(slots[0], sequence.ids[:100]), (slots[1], sequence.ids)]
        results.append(torch.cat(session.feed(requests)))
        assert_same(results[-1][100:], sequence.logits)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])


@scenario("S", 70)
def test_a_hundred_steps_use_the_same_buffers_and_grow_nothing(family: type[PoolConfig]) -> None:
    """The tensors at least; that the allocator is not called is shown on a GPU."""
    sequence = truth(256, seed=20)
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:20])
    groups = (session.builder._buffers.tensors, session.builder._scratch.tensors)
    before = {n: (t.data_ptr(), t.numel()) for g in groups for n, t in g.items()}
    nbytes = dict(session.builder.nbytes())
    for at in range(20, 120):
        logits = session.feed_one(slot, [sequence.ids[at]])
    assert_same(logits[0], sequence.logits[119])
    groups = (session.builder._buffers.tensors, session.builder._scratch.tensors)
    assert before == {n: (t.data_ptr(), t.numel()) for g in groups for n, t in g.items()}
    assert session.builder.nbytes() == nbytes
    shared = session.metadata.shared
    assert shared.swa_loc_T.data_ptr() == groups[0]["swa_loc"].data_ptr()


@scenario("S", 71)
def test_the_state_of_a_request_costs_the_same_for_any_chunk_size(
    family: type[PoolConfig],
) -> None:
    model = tiny_decoder().config
    costs = set()
    for chunk in (1024, 65536):
        pool = family(max_requests=4, max_context=65536)
        config = BackendConfig(pool=pool, max_batch_tokens=chunk).resolved(model)
        report = Backend.estimate(model, config)
        tables = {k: v for k, v in report.components.items() if k.startswith("layer")}
        costs.add((report.bytes_per_slot, report.bytes_per_token, *tables.items()))
    assert len(costs) == 1


@scenario("S", 71)
def test_a_prompt_is_admitted_by_its_pages_whatever_the_chunk(family: type[PoolConfig]) -> None:
    sequence = truth(128)
    session = Session(family, slots=1, context=128, num_pages=4, max_tokens=128)
    slot = session.open(128)
    assert session.pool.num_free_pages == 0
    assert_same(session.feed_one(slot, sequence.ids), sequence.logits)
