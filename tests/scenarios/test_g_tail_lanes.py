"""Class G: lanes behind a token's own, and values that are no number, decide nothing."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.config import PoolConfig
from tests import run_on
from tests.run_on import ops
from tests.scenarios import handmade
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("G", 23)
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200])
@pytest.mark.parametrize("deterministic", [False, True])
def test_lanes_behind_the_last_token_may_hold_rows_that_look_valid(
    num_tokens: int, deterministic: bool
) -> None:
    rng = run_on.generator(num_tokens)
    view, width = handmade.table(handmade.random(300, 16)), 24
    lists = [
        torch.randint(
            300, (int(torch.randint(width, (1,), generator=rng)),), generator=rng
        ).tolist()
        for _ in range(num_tokens)
    ]
    q, sink = handmade.random(num_tokens, 4, 16, seed=1), handmade.random(4, seed=2)
    outs = []
    tails = torch.randint(300, (num_tokens * width,), generator=rng)
    for behind in (None, tails.int(), torch.full_like(tails, handmade.POISON_INT).int()):
        made = handmade.source(view, lists, width=width)
        if behind is not None:
            made = type(made)(view, handmade.stream(lists, width=width, behind=behind))
        out, lse = torch.full_like(q, torch.nan), torch.full((num_tokens, 4), torch.nan)
        kernel = ops(deterministic).attend
        kernel.attend(q, [made], sink, scale=0.25, out_THD=out, lse_TH=lse)
        outs.append((out, lse))
    for out, lse in outs[1:]:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(lse, outs[0][1])
    expected, lse = handmade.attention(q, [view.storage[rows] for rows in lists], sink, 0.25)
    assert_same(outs[0][0], expected)
    assert_same(outs[0][1], lse)


@scenario("G", 24)
def test_scores_that_are_no_number_still_select_each_visible_entry_at_most_once() -> None:
    visible, topk, width = [0, 3, 8, 9, 20, 20, 20, 20], 8, 20
    scores = handmade.random(8, width, seed=3)
    scores[3, ::2] = torch.nan
    scores[4, :14] = torch.nan
    scores[5] = -torch.inf
    scores[6, 5] = torch.inf
    scores[6, 6:17] = -torch.inf
    scores[7] = torch.nan
    view = handmade.table(handmade.random(width, 4))
    inputs = handmade.score_inputs(view, visible, width=width)
    output = handmade.select_output(visible, topk, width)
    ops().select.select(scores, inputs, output, first_token=0)
    expected = [
        handmade.best(row.tolist(), n, topk) for row, n in zip(scores, visible, strict=True)
    ]
    assert handmade.picks(output) == expected


@scenario("G", 25)
@pytest.mark.parametrize("lanes", [128, 129, 133, 192])
def test_a_list_longer_than_a_tile_is_read_whole_and_no_further(lanes: int) -> None:
    """Window 128 with a draft block, in a buffer 192 wide; the lanes behind hold rows of NaN."""
    rows = handmade.random(400, 16)
    rows[200:] = math.nan
    lists = [list(range(5 * t, 5 * t + lanes)) for t in range(2)]
    behind = torch.randint(200, 400, (2 * 192,)).int()
    view = handmade.table(rows)
    made = handmade.Source(view, handmade.stream(lists, width=192, behind=behind))
    q, sink = handmade.random(2, 4, 16, seed=1), handmade.random(4, seed=2)
    expected, _ = handmade.attention(q, [rows[r] for r in lists], sink, 0.25)
    for deterministic in (False, True):
        out = torch.full_like(q, torch.nan)
        kernel = ops(deterministic).attend
        kernel.attend(q, [made], sink, scale=0.25, out_THD=out)
        assert_same(out, expected)


@scenario("G", 25)
@pytest.mark.parametrize("depth", [1, 5, 12])
def test_no_token_has_more_lanes_than_its_stream_is_wide(
    family: type[PoolConfig], depth: int
) -> None:
    sequence = truth(64)
    session = Session(family, depth=depth)
    slots = session.open_all(4)
    session.feed([(slot, sequence.ids[: 9 * slot + 1]) for slot in slots])
    session.forward([(slot, sequence.ids[:depth]) for slot in slots])
    shared = session.metadata.shared
    for stream in (shared.window_stream, *shared.entry_streams.values()):
        assert int(stream.indptr_T1.diff().max()) <= stream.max_rows
        assert len(stream.indices_N) == shared.shape.num_tokens * stream.max_rows
