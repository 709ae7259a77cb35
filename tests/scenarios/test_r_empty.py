"""Class R: no entries, no rows, no requests: nothing faults and nothing is NaN."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.metadata.batch import ForwardBatch
from tests.run_on import ops
from tests.scenarios import handmade
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("R", 67)
@pytest.mark.parametrize("requests", [1, 32])
def test_a_batch_in_which_nobody_sees_an_entry_reads_windows_alone(
    family: type[PoolConfig], requests: int
) -> None:
    sequence = truth(64)
    session = Session(family, slots=requests)
    slots = session.open_all(requests)
    for start, end in ((0, 1), (1, 2), (2, 3)):
        logits = session.feed([(slot, sequence.ids[start:end]) for slot in slots])
        for rows in logits:
            assert_same(rows, sequence.logits[start:end])
        for visible in session.metadata.shared.num_visible.values():
            assert not visible.any()
    session.assert_guards_intact()


@scenario("R", 67)
@pytest.mark.parametrize("batch", [(), (-1,), (-1, -1), (0,)])
def test_a_forward_of_no_tokens_changes_nothing(
    family: type[PoolConfig], batch: tuple[int, ...]
) -> None:
    sequence = truth(64)
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:7])
    before = session.memory()
    idle = ForwardBatch(slots=batch, query_lengths=(0,) * len(batch), token_ids=())
    assert session.run_batch(idle).shape == (0, 64)
    assert session.run_batch(idle.padded(num_tokens=4)).isfinite().all()
    assert session.memory() == before
    assert_same(session.feed_one(slot, sequence.ids[7:9]), sequence.logits[7:9])


@scenario("R", 68)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sink", [0.5, -torch.inf, torch.inf])
def test_a_token_without_any_row_gives_zero_and_never_nan(deterministic: bool, sink: float) -> None:
    """Tokens 0 and 2 read nothing, token 1 one row; with and without a sink."""
    view = handmade.table(handmade.random(8, 4))
    sources = [
        handmade.source(view, [[], [3], []], width=4),
        handmade.source(view, [[], [], []], width=0),
    ]
    q, sinks = handmade.random(3, 2, 4), torch.full((2,), sink)
    out, lse = torch.full_like(q, torch.nan), torch.full((3, 2), torch.nan)
    kernel = ops(deterministic).attend
    kernel.attend(q, sources, sinks, scale=0.5, out_THD=out, lse_TH=lse)
    assert not out[[0, 2]].any()
    assert (lse[[0, 2]] == -torch.inf).all()
    assert out.isfinite().all()
    assert_same(lse[1], (q[1] @ view.storage[3]) * 0.5)
    share = 1 / (1 + torch.exp(sinks - lse[1]))
    assert_same(out[1], share.unsqueeze(-1) * view.storage[3])


@scenario("R", 68)
def test_a_forward_of_sources_without_any_lane_gives_zero() -> None:
    view = handmade.table(handmade.random(8, 4))
    out, lse = torch.full((2, 3, 4), torch.nan), torch.full((2, 3), torch.nan)
    ops().attend.attend(
        handmade.random(2, 3, 4),
        [handmade.source(view, [[], []], width=0)],
        torch.zeros(3),
        scale=0.5,
        out_THD=out,
        lse_TH=lse,
    )
    assert not out.any()
    assert (lse == -torch.inf).all()
