"""Class O: what a forward wrote beyond the accepted tokens never shows, however often and however deep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.errors import RollbackError
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("O", 55)
def test_two_slots_with_other_accept_counts_stay_apart_for_fifty_rounds(
    family: type[PoolConfig],
) -> None:
    sequences = (truth(256, seed=20), truth(256, seed=21))
    session = Session(family, depth=4)
    slots, at = session.open_all(2), [9, 14]
    session.feed([(s, q.ids[:n]) for s, q, n in zip(slots, sequences, at, strict=True)])
    for turn in range(50):
        accepted = ((1, 4), (4, 1), (2, 3))[turn % 3]
        batch = []
        for slot, sequence, n, keep in zip(slots, sequences, at, accepted, strict=True):
            batch.append((slot, [*sequence.ids[n : n + keep], *sequence.wrong(n + keep, 4 - keep)]))
        logits = session.verify(batch, accepted)
        for request, (sequence, keep) in enumerate(zip(sequences, accepted, strict=True)):
            n = at[request]
            assert_same(logits[request][:keep], sequence.logits[n : n + keep])
            at[request] = n + keep
    session.assert_guards_intact()


@scenario("O", 56)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_row_i_of_a_verify_forward_has_the_bits_of_single_step_i(
    family: type[PoolConfig], width: int
) -> None:
    sequence, start = truth(64), 14
    session = Session(family, slots=5, depth=4, deterministic=True)
    slots = session.open_all(width + 1)
    session.feed([(slot, sequence.ids[:start]) for slot in slots])
    single = [session.feed_one(slots[-1], sequence.ids[p : p + 1])[0] for p in range(start, 30)]
    for accept, slot in enumerate(slots[:-1], start=1):
        tokens = [
            *sequence.ids[start : start + accept],
            *sequence.wrong(start + accept, width - accept),
        ]
        rows = session.verify([(slot, tokens)], [accept])[0]
        for i in range(accept):
            assert torch.equal(rows[i], single[i])
            assert rows[i].argmax() == sequence.logits[start + i].argmax()
        for p in range(start + accept, start + accept + 6):
            assert torch.equal(
                session.feed_one(slot, sequence.ids[p : p + 1])[0], single[p - start]
            )


@scenario("O", 57)
def test_one_accepted_of_eight_round_after_round_then_all_eight(family: type[PoolConfig]) -> None:
    """Three windows of the large ratio one token at a time, every round overwriting seven wrong ones."""
    sequence = truth(192, seed=22)
    session = Session(family, depth=8)
    slot, at = session.open(), 2
    session.feed_one(slot, sequence.ids[:at])
    for _ in range(3 * 16):
        tokens = [sequence.ids[at], *sequence.wrong(at + 1, 7)]
        logits = session.verify([(slot, tokens)], [1])[0]
        assert_same(logits[0], sequence.logits[at])
        at += 1
    for _ in range(8):
        logits = session.verify([(slot, sequence.ids[at : at + 8])], [8])[0]
        assert_same(logits, sequence.logits[at : at + 8])
        at += 8


@scenario("O", 58)
@pytest.mark.parametrize("ratio", [4, 16])
def test_the_close_after_a_partly_accepted_verify_is_right_at_every_phase(
    family: type[PoolConfig], ratio: int
) -> None:
    sequence = truth(64, seed=3)
    cases = [(accept, phase) for accept in range(1, 5) for phase in range(ratio)]
    session = Session(family, slots=len(cases), context=64, depth=4, max_tokens=4096)
    slots = session.open_all(len(cases))
    starts = [ratio + phase for _, phase in cases]
    session.feed([(s, sequence.ids[:n]) for s, n in zip(slots, starts, strict=True)])
    rounds = [
        (s, [*sequence.ids[n : n + accept], *sequence.wrong(n + accept, 4 - accept)])
        for s, n, (accept, _) in zip(slots, starts, cases, strict=True)
    ]
    session.verify(rounds, [accept for accept, _ in cases])
    ends = [n + accept for n, (accept, _) in zip(starts, cases, strict=True)]
    rest = session.feed(
        [(s, sequence.ids[n : n + ratio]) for s, n in zip(slots, ends, strict=True)]
    )
    for rows, n in zip(rest, ends, strict=True):
        assert_same(rows, sequence.logits[n : n + ratio])


@scenario("O", 58)
@pytest.mark.parametrize("depth", [2, 5, 12])
def test_committed_tokens_can_be_taken_back_as_far_as_the_margin(
    family: type[PoolConfig], depth: int
) -> None:
    """Commit all of a verify, roll back to each length within D, and go on another way."""
    sequence = truth(64, seed=3)
    session = Session(family, slots=depth, context=64, depth=depth)
    slots = session.open_all(depth)
    starts = [13 + slot for slot in slots]
    session.feed([(s, sequence.ids[:n]) for s, n in zip(slots, starts, strict=True)])
    kept = [n + slot for slot, n in zip(slots, starts, strict=True)]
    batch = []
    for slot, n, end in zip(slots, starts, kept, strict=True):
        batch.append((slot, [*sequence.ids[n:end], *sequence.wrong(end, depth - slot)]))
    session.feed(batch)
    for slot, end in zip(slots, kept, strict=True):
        session.pool.rollback(slot, end)
    logits = session.feed([(s, sequence.ids[n : n + 17]) for s, n in zip(slots, kept, strict=True)])
    for rows, n in zip(logits, kept, strict=True):
        assert_same(rows, sequence.logits[n : n + 17])


@scenario("O", 59)
def test_a_rollback_beyond_the_margin_raises_and_changes_nothing(family: type[PoolConfig]) -> None:
    sequence = truth(64)
    session = Session(family, depth=3)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:20])
    before = session.memory()
    for length in (16, 0, -1, 21):
        with pytest.raises(RollbackError, match=f"rollback to {length} from length 20"):
            session.pool.rollback(slot, length)
    assert session.memory() == before
    assert session.pool.length(slot) == 20
    session.pool.rollback(slot, 17)
    assert_same(session.feed_one(slot, sequence.ids[17:24]), sequence.logits[17:24])


@scenario("O", 59)
def test_accepted_counts_may_be_list_tensor_or_array(family: type[PoolConfig]) -> None:
    sequence = truth(64)
    session = Session(family, depth=3)
    slots = session.open_all(2)
    forms = (
        [1, 2],
        torch.tensor([1, 2]),
        np.array([1, 2]),
        torch.tensor([1, 2], dtype=torch.int32),
    )
    at = [5, 9]
    session.feed([(s, sequence.ids[:n]) for s, n in zip(slots, at, strict=True)])
    for form in forms:
        logits = session.forward(
            [(s, sequence.ids[n : n + 3]) for s, n in zip(slots, at, strict=True)]
        )
        for rows, n in zip(logits, at, strict=True):
            assert_same(rows, sequence.logits[n : n + 3])
        session.builder.advance(torch.as_tensor(form))
        session.commit([(s, int(n)) for s, n in zip(slots, form, strict=True)])
        at = [n + int(a) for n, a in zip(at, form, strict=True)]
        assert session.pool.lengths[slots].tolist() == at
