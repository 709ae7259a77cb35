"""Class U: numbers come from the config, any of them; nothing falls through at an odd width."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import ModelConfig, PoolConfig
from dsv4.errors import BatchError, ConfigError
from tests.run_on import ops
from tests.scenarios import handmade
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


@scenario("U", 74)
def test_backends_of_other_top_k_run_side_by_side(family: type[PoolConfig]) -> None:
    """8, 512 and 1024 in one process, and 3, with which most entries are left out."""
    runs = []
    for topk in (3, 8, 512, 1024):
        decoder = tiny_decoder(index_topk=topk)
        sequence = truth(96, decoder=decoder)
        session = Session(family, decoder)
        runs.append((session, sequence, session.open()))
    for start, end in ((0, 60), (60, 61), (61, 80)):
        for session, sequence, slot in runs:
            logits = session.feed_one(slot, sequence.ids[start:end])
            assert_same(logits, sequence.logits[start:end])
    for (session, _, _), expected in zip(runs, (3, 8, 20, 20), strict=True):
        (topk,) = {key for key in session.metadata.shared.entry_streams if key[0] == 4}
        sizes = session.metadata.shared.entry_streams[topk].indptr_T1.diff()
        assert int(sizes.max()) == expected


def published(ratios: list[int]) -> dict[str, object]:
    """A document in the published style: the preset's, with another ratio table."""
    document = dict(ModelConfig.preset("tiny").to_json())
    return document | {"compress_ratios": ratios, "num_hidden_layers": len(ratios) - 1}


@scenario("U", 75)
def test_the_draft_layer_has_its_own_entry_of_the_ratio_table() -> None:
    layers = ModelConfig.from_json(published([128, 128, 4, 128, 4, 0])).layers
    assert [layer.ratio for layer in layers] == [128, 128, 4, 128, 4, 0]
    assert [layer.is_draft for layer in layers] == [False] * 5 + [True]
    assert layers[-1].rope_theta == 10_000.0
    assert layers[-1].yarn is None


@scenario("U", 75)
def test_a_ratio_table_shorter_than_the_layers_is_refused() -> None:
    document = published([128, 128, 4, 128, 4, 0]) | {"compress_ratios": [128, 128, 4]}
    with pytest.raises(ConfigError, match=r"compress_ratios.*3"):
        ModelConfig.from_json(document)


@scenario("U", 76)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65])
@pytest.mark.parametrize("lanes", [1, 16, 127, 129, 133, 160, 192, 200, 257, 641])
def test_any_number_of_lanes_and_tokens_is_attended_exactly(num_tokens: int, lanes: int) -> None:
    rows = handmade.random(700, 8)
    lists = [[(t + 3 * k) % 700 for k in range(lanes)] for t in range(num_tokens)]
    q, sink = handmade.random(num_tokens, 2, 8, seed=1), handmade.random(2, seed=2)
    expected, expected_lse = handmade.attention(q, [rows[r] for r in lists], sink, 0.3)
    split = min(lanes, 128)
    parts = [
        handmade.source(handmade.table(rows), [r[:split] for r in lists], width=split),
        handmade.source(handmade.table(rows), [r[split:] for r in lists], width=lanes - split),
    ]
    for deterministic in (False, True):
        out, lse = torch.full_like(q, torch.nan), torch.full((num_tokens, 2), torch.nan)
        kernel = ops(deterministic).attend
        kernel.attend(q, parts, sink, scale=0.3, out_THD=out, lse_TH=lse)
        assert_same(out, expected)
        assert_same(lse, expected_lse)


@scenario("U", 76)
@pytest.mark.parametrize(("window", "hca"), [(1, 4), (5, 12), (19, 20), (33, 64)])
def test_windows_and_ratios_that_are_no_power_of_two_equal_a_recompute(
    family: type[PoolConfig], window: int, hca: int
) -> None:
    decoder = tiny_decoder(sliding_window=window, hca=hca)
    sequence = truth(80, decoder=decoder)
    session = Session(family, decoder, page=4 * hca, depth=3)
    slot, start = session.open(), 0
    for end in (7, 8, 10, 41, 44, 45, 70, 73, 80):
        logits = session.feed_one(slot, sequence.ids[start:end])
        assert_same(logits, sequence.logits[start:end])
        start = end


@scenario("U", 77)
def test_a_batch_at_the_capacity_is_exact_and_one_above_it_is_refused(
    family: type[PoolConfig],
) -> None:
    sequence = truth(64)
    session = Session(family, slots=3, max_tokens=48)
    slots = session.open_all(3)
    logits = session.feed([(slot, sequence.ids[:16]) for slot in slots])
    for rows in logits:
        assert_same(rows, sequence.logits[:16])
    before = session.memory()
    with pytest.raises(BatchError, match="49 tokens: the backend holds 48"):
        session.forward([(0, sequence.ids[16:32]), (1, sequence.ids[16:49])])
    with pytest.raises(BatchError, match="4 requests: the backend holds 3"):
        session.forward([(0, [1]), (1, [1]), (2, [1]), (-1, [1])])
    assert session.memory() == before
    for rows in session.feed([(slot, sequence.ids[16:32]) for slot in slots]):
        assert_same(rows, sequence.logits[16:32])
