"""Class P: a sequence gives the same logits however it is cut into forwards."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.pool.base import Region
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


@scenario("P", 60)
def test_prefill_then_decode_equals_a_recompute_for_every_split(family: type[PoolConfig]) -> None:
    sequence = truth(32)
    session = Session(family, slots=20)
    slots = session.open_all(20)
    prompts = [(slot, sequence.ids[: slot + 1]) for slot in slots]
    for (slot, prompt), logits in zip(prompts, session.feed(prompts), strict=True):
        assert_same(logits, sequence.logits[: len(prompt)], 1e-5)
        assert session.pool.length(slot) == len(prompt)
    for step in range(12):
        at = [slot + 1 + step for slot in slots]
        logits = session.feed(
            [(s, sequence.ids[p : p + 1]) for s, p in zip(slots, at, strict=True)]
        )
        assert_same(torch.cat(logits), sequence.logits[at])
    session.assert_guards_intact()


@scenario("P", 61)
def test_every_chunk_adds_its_index_keys_beside_its_entries(family: type[PoolConfig]) -> None:
    sequence = truth(45, seed=1)
    session, start = Session(family), 0
    slot = session.open()
    for chunk in (16, 16, 13):
        logits = session.feed_one(slot, sequence.ids[start : start + chunk])
        assert_same(logits, sequence.logits[start : start + chunk])
        start += chunk
        count = start // 4
        run = sequence.run
        assert_same(session.entry_rows(slot, 1, Region.ENTRIES, count), run.entries[1][:count])
        assert_same(session.entry_rows(slot, 1, Region.INDEX, count), run.index_keys[1][:count])


@scenario("P", 61)
def test_an_entry_of_an_early_chunk_is_selected_by_a_later_one(family: type[PoolConfig]) -> None:
    """The planted keys are REF's own picks: some token of the last chunk reads an entry of the first."""
    sequence = truth(45, seed=1)
    session = Session(family)
    slot = session.open()
    for start, end in ((0, 16), (16, 32), (32, 45)):
        session.feed_one(slot, sequence.ids[start:end])
    stream = session.metadata.shared.entry_streams[4, 8]
    base = session.pool.geometry.entry_base
    pages = session.pool.block_table[slot].tolist()
    seen_early = False
    for token, position in enumerate(range(32, 45)):
        first, last = stream.indptr_T1[token : token + 2].tolist()
        rows = [row - base for row in stream.indices_N[first:last].tolist()]
        entries = [pages.index(row // 8) * 8 + row % 8 for row in rows]
        assert entries == sequence.run.picks[1][position]
        seen_early |= any(entry < 4 for entry in entries)
    assert seen_early


@scenario("P", 62)
def test_a_short_prompt_is_read_token_by_token(family: type[PoolConfig]) -> None:
    """The logits of a prompt of any length up to 40 equal REF's, and each of its tokens moves them."""
    sequence = truth(40, seed=2)
    session = Session(family, slots=41, max_tokens=1024)
    slots = session.open_all(41)
    longest = [(slot, sequence.ids[: slot + 1]) for slot in slots[:40]]
    for (slot, _), logits in zip(longest, session.feed(longest), strict=True):
        assert_same(logits[-1], sequence.logits[slot])


@scenario("P", 62)
@pytest.mark.parametrize("length", [1, 3, 4, 17, 40])
def test_every_prompt_token_moves_the_last_logits(family: type[PoolConfig], length: int) -> None:
    sequence = truth(40, seed=2)
    session = Session(family, slots=length, max_tokens=2048)
    slots = session.open_all(length)
    changed = []
    for at, slot in enumerate(slots):
        ids = list(sequence.ids[:length])
        ids[at] = (ids[at] + 7) % 64
        changed.append((slot, ids))
    for logits in session.feed(changed):
        assert (logits[-1] - sequence.logits[length - 1]).abs().max() > 1e-4
