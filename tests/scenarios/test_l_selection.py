"""Class L: index scores, and the entries chosen by them."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import PoolConfig
from tests.run_on import ops
from tests.scenarios import handmade
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("L", 44)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", [(1000,), (1,) * 1000])
def test_scores_are_the_weighted_sum_of_rectified_products(
    deterministic: bool, lengths: tuple[int, ...]
) -> None:
    """1000 tokens, weights of both signs; the best eight as a set, where the eighth leads by more than rounding."""
    entries, heads, dim, count = 40, 4, 16, 1000
    keys, q = handmade.random(entries, dim), handmade.random(count, heads, dim, seed=1)
    weights = handmade.random(count, heads, seed=2)
    assert (weights < 0).any()
    visible = [1 + t % entries for t in range(count)]
    inputs = handmade.score_inputs(
        handmade.table(keys), visible, width=entries, query_lengths=lengths
    )
    scores = torch.full((count, entries), torch.nan)
    ops(deterministic).score.score(q, weights, inputs, first_token=0, out_TN=scores)
    output = handmade.select_output(visible, 8, entries)
    ops().select.select(scores, inputs, output, first_token=0)
    found = handmade.picks(output)
    dots = torch.einsum("thd,nd->thn", q.double(), keys.double()).clamp(min=0)
    expected = torch.einsum("th,thn->tn", weights.double(), dots).float()
    for t in range(count):
        assert_same(scores[t, : visible[t]], expected[t, : visible[t]])
        assert (scores[t, visible[t] :] == -torch.inf).all()
        ranked = expected[t, : visible[t]].sort(descending=True).values
        if len(ranked) <= 8 or ranked[7] - ranked[8] > 1e-4:
            assert found[t] == handmade.best(expected[t].tolist(), visible[t], 8)


@scenario("L", 45)
def test_after_a_partly_accepted_verify_no_selection_of_the_rejected_branch_is_left(
    family: type[PoolConfig],
) -> None:
    """Verify 4, accept 2: what the next token selects are REF's picks, and visible."""
    sequence, start = truth(96), 70
    session = Session(family, depth=4)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:start])
    for at in range(start, start + 16, 2):
        tokens = [*sequence.ids[at : at + 2], *sequence.wrong(at + 2, 2)]
        session.verify([(slot, tokens)], [2])
        logits = session.forward([(slot, [sequence.ids[at + 2]])])[0]
        assert_same(logits[0], sequence.logits[at + 2])
        stream = session.metadata.shared.entry_streams[4, 8]
        first, last = stream.indptr_T1.tolist()
        base = session.pool.geometry.entry_base
        pages = session.pool.block_table[slot].tolist()
        rows = [row - base for row in stream.indices_N[first:last].tolist()]
        entries = [8 * pages.index(row // 8) + row % 8 for row in rows]
        assert entries == sequence.run.picks[1][at + 2]
        assert max(entries) < (at + 3) // 4


@scenario("L", 46)
@pytest.mark.parametrize("visible", [7, 8, 9])
def test_rows_of_nan_still_give_ascending_entries(visible: int) -> None:
    topk, width = 8, 12
    scores = handmade.random(4, width)
    scores[0] = torch.nan
    scores[1, ::2] = torch.nan
    scores[2, :visible] = torch.tensor(float("nan"))
    inputs = handmade.score_inputs(
        handmade.table(handmade.random(width, 4)), [visible] * 4, width=width
    )
    output = handmade.select_output([visible] * 4, topk, width)
    ops().select.select(scores, inputs, output, first_token=0)
    found = handmade.picks(output)
    assert found[0] == list(range(min(topk, visible)))
    assert found == [handmade.best(row.tolist(), visible, topk) for row in scores]
    for entries in found:
        assert entries == sorted(set(entries))
        assert all(0 <= entry < visible for entry in entries)


@scenario("L", 46)
def test_equal_scores_go_to_the_lower_entries() -> None:
    scores = torch.zeros(3, 12)
    scores[1, 3], scores[1, 9], scores[1, 11] = -0.0, 1.0, 1.0
    scores[2] = torch.tensor([0.0, 1.0] * 6)
    inputs = handmade.score_inputs(handmade.table(handmade.random(12, 4)), [12] * 3, width=12)
    output = handmade.select_output([12] * 3, 4, 12)
    ops().select.select(scores, inputs, output, first_token=0)
    assert handmade.picks(output) == [[0, 1, 2, 3], [0, 1, 9, 11], [1, 3, 5, 7]]
