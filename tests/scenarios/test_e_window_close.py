"""Class E: entries close with their last token, pool the right tokens, and are visible from then on, not before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.config import PoolConfig
from dsv4.pool.base import Region
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


@scenario("E", 15)
@pytest.mark.parametrize(
    ("hca", "lengths"), [(16, (*range(1, 10), *range(14, 19))), (128, range(126, 131))]
)
def test_row_zero_appears_with_the_last_token_of_its_window(
    family: type[PoolConfig], hca: int, lengths: range | tuple[int, ...]
) -> None:
    decoder = tiny_decoder(hca=hca)
    sequence = truth(130, seed=7, decoder=decoder)
    session = Session(family, decoder, slots=len(lengths), context=256, page=hca, max_tokens=700)
    slots = session.open_all(len(lengths))
    batch = [(slot, sequence.ids[:n]) for slot, n in zip(slots, lengths, strict=True)]
    for (slot, ids), logits in zip(batch, session.feed(batch), strict=True):
        assert_same(logits, sequence.logits[: len(ids)])
        for layer, ratio in ((1, 4), (2, hca)):
            rows = session.entry_rows(slot, layer, Region.ENTRIES, 1)
            if len(ids) < ratio:
                assert rows.isnan().all(), "nothing may be stored before the window closes"
            else:
                assert_same(rows, sequence.run.entries[layer][:1])


@scenario("E", 16)
def test_no_output_depends_on_a_later_token(family: type[PoolConfig]) -> None:
    """40 requests, each with another token changed: outputs in front of it keep their bits, in every layer."""
    ids, count = truth(64).ids[:40], 40
    session = Session(family, slots=count + 1, deterministic=True, max_tokens=2048)
    slots = session.open_all(count + 1)
    batch = [(slots[-1], list(ids))]
    for at in range(count):
        batch.append((slots[at], [*ids[:at], (ids[at] + 1) % 64, *ids[at + 1 :]]))
    seen: dict[int, Tensor] = {}

    def probe(name: str, layer: int, value: Tensor) -> None:
        if name == "attn_out":
            seen[layer] = value.clone().view(count + 1, count, -1)

    logits = torch.stack(session.forward(batch, probe=probe))
    for per_token in (*seen.values(), logits):
        true, changed = per_token[0], per_token[1:]
        for at in range(count):
            assert torch.equal(changed[at, :at], true[:at])
            assert not torch.equal(changed[at, at], true[at])
    assert sorted(seen) == [0, 1, 2]


@scenario("E", 17)
def test_rows_of_decoded_tokens_pool_the_window_before_them_too(family: type[PoolConfig]) -> None:
    sequence = truth(64)
    session = Session(family)
    stepped, at_once = session.open_all(2)
    session.feed_one(at_once, sequence.ids[:20])
    session.feed_one(stepped, sequence.ids[:8])
    for at in range(8, 20):
        session.feed_one(stepped, sequence.ids[at : at + 1])
    for region, expected in (
        (Region.ENTRIES, sequence.run.entries[1]),
        (Region.INDEX, sequence.run.index_keys[1]),
    ):
        rows = session.entry_rows(stepped, 1, region, 5)
        assert_same(rows, session.entry_rows(at_once, 1, region, 5))
        assert_same(rows, expected[:5])


@scenario("E", 17)
def test_row_zero_pools_no_token_before_the_sequence(family: type[PoolConfig]) -> None:
    """A slot whose state ring is full of another request's rows gives the first entry of a fresh pool."""
    used, fresh = Session(family, slots=1), Session(family, slots=1)
    slot = used.open()
    used.feed_one(slot, truth(64).ids[:31])
    used.pool.release(slot)
    ids = truth(64, seed=6).ids[:4]
    for session in (used, fresh):
        session.feed_one(session.open(), ids)
    rows = used.entry_rows(slot, 1, Region.ENTRIES, 1)
    assert torch.equal(rows, fresh.entry_rows(slot, 1, Region.ENTRIES, 1))
    assert_same(rows, truth(64, seed=6).run.entries[1][:1])


@scenario("E", 18)
def test_pooled_visibility_counts_from_the_absolute_position_in_every_chunk(
    family: type[PoolConfig],
) -> None:
    sequence, start = truth(64), 0
    session = Session(family)
    slot = session.open()
    for chunk in (5, 7, 13):
        logits = session.feed_one(slot, sequence.ids[start : start + chunk])
        for ratio in (4, 16):
            visible = session.metadata.shared.num_visible[ratio].tolist()
            assert visible == [(p + 1) // ratio for p in range(start, start + chunk)]
        assert_same(logits, sequence.logits[start : start + chunk])
        start += chunk
