"""Class N: any mixture of query lengths and positions; each token finds its own request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.metadata.batch import ForwardBatch
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("N", 50)
@pytest.mark.parametrize("query_lengths", [(1, 7, 3), (4, 0, 4), (0, 0, 2), (5, 1, 0)])
def test_each_token_belongs_to_the_request_that_brought_it(
    family: type[PoolConfig], query_lengths: tuple[int, ...]
) -> None:
    sequence, slots, starts = truth(64), (2, 0, 3), (9, 20, 3)
    session = Session(family)
    session.open_all(4)
    session.feed([(slot, sequence.ids[:n]) for slot, n in zip(slots, starts, strict=True)])
    cases = list(zip(slots, starts, query_lengths, strict=True))
    logits = session.forward([(slot, sequence.ids[n : n + q]) for slot, n, q in cases])
    shared = session.metadata.shared
    assert shared.slot_T.tolist() == [slot for slot, _, q in cases for _ in range(q)]
    assert shared.positions_T.tolist() == [p for _, n, q in cases for p in range(n, n + q)]
    assert shared.request_T.tolist() == [b for b, (_, _, q) in enumerate(cases) for _ in range(q)]
    for rows, (_, n, q) in zip(logits, cases, strict=True):
        assert_same(rows, sequence.logits[n : n + q])


@scenario("N", 51)
def test_one_decode_step_at_four_far_apart_positions_equals_four_alone(
    family: type[PoolConfig],
) -> None:
    ids, starts = truth(64).ids * 16, (0, 3, 127, 1000)
    session = Session(family, context=1024, max_tokens=1024, deterministic=True)
    slots = session.open_all(4)
    for slot, n in zip(slots, starts, strict=True):
        if n:
            session.feed_one(slot, ids[:n])
    together = session.forward([(s, ids[n : n + 1]) for s, n in zip(slots, starts, strict=True)])
    assert session.metadata.positions_T.tolist() == list(starts)
    for slot, n, logits in zip(slots, starts, together, strict=True):
        assert torch.equal(logits, session.forward([(slot, ids[n : n + 1])])[0])


@scenario("N", 52)
@pytest.mark.parametrize("front", [True, False])
def test_padding_tokens_enter_no_window(family: type[PoolConfig], front: bool) -> None:
    """Prompts padded to one length, in front or behind, by tokens of a request without a slot."""
    sequence, lengths = truth(64), (6, 19, 11)
    session = Session(family, slots=6)
    slots = session.open_all(3)
    requests: list[tuple[int, list[int]]] = []
    for slot, n in zip(slots, lengths, strict=True):
        pads, real = (-1, [0] * (19 - n)), (slot, list(sequence.ids[:n]))
        requests += [pads, real] if front else [real, pads]
    found = {s: rows for (s, _), rows in zip(requests, session.feed(requests), strict=True)}
    for slot, n in zip(slots, lengths, strict=True):
        assert_same(found[slot], sequence.logits[:n])
    logits = session.feed(
        [(s, sequence.ids[n : n + 14]) for s, n in zip(slots, lengths, strict=True)]
    )
    for n, rows in zip(lengths, logits, strict=True):
        assert_same(rows, sequence.logits[n : n + 14])
    session.assert_guards_intact()


@scenario("N", 53)
def test_a_long_and_a_short_request_in_one_batch_equal_each_alone(
    family: type[PoolConfig],
) -> None:
    long_ids, short_ids = (truth(64).ids * 43)[:2734], truth(64, seed=5).ids[:14]
    session = Session(family, context=2752, max_tokens=2048, deterministic=True)
    a, b, c, d = session.open_all(4)
    session.feed([(a, long_ids[:1400]), (b, short_ids[:3])])
    mine = session.feed([(a, long_ids[1400:]), (b, short_ids[3:])])
    session.feed_one(c, long_ids[:1400])
    assert torch.equal(mine[0][-1], session.feed_one(c, long_ids[1400:])[-1])
    session.feed_one(d, short_ids[:3])
    assert torch.equal(mine[1], session.feed_one(d, short_ids[3:]))
    together = session.forward([(a, [7]), (b, [9])])
    assert torch.equal(together[0], session.forward([(c, [7])])[0])
    assert torch.equal(together[1], session.forward([(d, [9])])[0])


@scenario("N", 53)
def test_slots_lengths_and_ids_may_be_any_integers() -> None:
    plain = ForwardBatch(slots=(1, 0), query_lengths=(2, 1), token_ids=(5, 6, 7))
    for kind in (np.int32, np.int64):
        assert plain == ForwardBatch(
            slots=np.array([1, 0], kind),  # type: ignore[arg-type]
            query_lengths=np.array([2, 1], kind),  # type: ignore[arg-type]
            token_ids=np.array([5, 6, 7], kind),  # type: ignore[arg-type]
        )
    for dtype in (torch.int32, torch.int64):
        assert plain == ForwardBatch(
            slots=torch.tensor([1, 0], dtype=dtype),  # type: ignore[arg-type]
            query_lengths=torch.tensor([2, 1], dtype=dtype),  # type: ignore[arg-type]
            token_ids=torch.tensor([5, 6, 7], dtype=dtype),  # type: ignore[arg-type]
        )


@scenario("N", 54)
@pytest.mark.parametrize("query_lengths", [(2, 2, 2), (1, 5, 3), (4, 0, 1)])
def test_the_newest_row_of_a_request_is_the_end_of_its_tokens(
    family: type[PoolConfig], query_lengths: tuple[int, ...]
) -> None:
    sequence = truth(64)
    session = Session(family)
    slots = session.open_all(3)
    batch = ForwardBatch.of(
        [(s, sequence.ids[:q]) for s, q in zip(slots, query_lengths, strict=True)]
    )
    session.run_batch(batch.padded(num_tokens=16))
    ends = np.cumsum(query_lengths) - 1
    expected = [int(e) if q else -1 for e, q in zip(ends, query_lengths, strict=True)]
    assert session.metadata.shared.last_row_B.tolist() == expected
    assert list(batch.last_rows) == expected
