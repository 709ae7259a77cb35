"""Class F: -1 is no row and 0 is an ordinary one, for slots, pages and rows alike."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from dsv4.config import PoolConfig
from dsv4.metadata.batch import ForwardBatch
from dsv4.model.model import Model
from dsv4.pool.base import Component, Region
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth


def rows_of(component: Component) -> list[bytes]:
    """Stored bytes of every row, one by one."""
    if component.format is None:
        return [row.numpy().tobytes() for row in component.storage]
    per_slot, per_page = component.rows_per_slot, component.rows_per_page
    assert per_slot or per_page
    return [row.numpy().tobytes() for row in component.storage]


def may_change(session: Session, name: str, requests: list[tuple[int, int]]) -> set[int]:
    """Rows of a table that a decode step of (slot, position) pairs writes, by hand."""
    geometry, table = session.pool.geometry, session.pool.block_table.tolist()
    layer, _, region = name.partition(".")
    ratio = {"layer0": 0, "layer1": 4, "layer2": 16}.get(layer, 0)
    per_page = 32 // ratio if ratio else 0
    base = geometry.max_requests * geometry.ring_rows if region == "kv" else 0
    rows: set[int] = set()
    for slot, position in requests:
        closes = bool(ratio) and (position + 1) % ratio == 0
        if closes and region in ("kv", "entries", "index"):
            entry = position // ratio
            page = table[slot][entry // per_page]
            rows.add(base + page * per_page + entry % per_page)
        if region in ("kv", "window"):
            rows.add(slot * geometry.ring_rows + position % geometry.ring_rows)
        if region in ("state", "index_state"):
            ring = 8 + geometry.in_place_tokens - 1 if ratio == 4 else geometry.in_place_tokens
            rows.add(slot * ring + position % ring)
        if region == "accumulator" or name == "lengths":
            rows.add(slot)
    return rows


@scenario("F", 19)
def test_a_decode_step_changes_the_rows_it_closes_and_no_other(family: type[PoolConfig]) -> None:
    """Five requests of all phases, twenty steps; slot 0 and page 0 belong to one of them."""
    sequence, starts = truth(64), [5, 6, 7, 8, 17]
    session = Session(family, slots=6)
    slots = session.open_all(5)
    assert slots[0] == 0
    assert session.pool.block_table[0, 0] == 0
    session.feed([(slot, sequence.ids[:n]) for slot, n in zip(slots, starts, strict=True)])
    for step in range(20):
        at = [n + step for n in starts]
        before = {c.table: rows_of(c) for c in session.pool.components()}
        logits = session.feed(
            [(slot, sequence.ids[p : p + 1]) for slot, p in zip(slots, at, strict=True)]
        )
        assert_same(torch.cat(logits), sequence.logits[at])
        for component in session.pool.components():
            table = component.table
            after = rows_of(component)
            changed = {i for i, row in enumerate(after) if row != before[table][i]}
            allowed = may_change(session, table, list(zip(slots, at, strict=True)))
            assert changed <= allowed, f"{table}: {changed - allowed} written at step {step}"
            if table in ("layer0.kv", "layer0.window", "layer1.index", "lengths"):
                assert changed == allowed


@scenario("F", 20)
def test_requests_without_a_slot_store_nothing_and_give_nothing(family: type[PoolConfig]) -> None:
    sequence = truth(64)
    session = Session(family, slots=4)
    session.open_all(4)
    session.feed([(3, sequence.ids[:18]), (0, sequence.ids[:11])])
    bytes_of_others = [session.slot_bytes(slot) for slot in (1, 2)]
    attention: list[Tensor] = []

    def probe(name: str, layer: int, value: Tensor) -> None:
        if name == "attn_out":
            attention.append(value)

    requests = [(3, [sequence.ids[18]]), (-1, [5]), (0, [sequence.ids[11]]), (-1, [6])]
    logits = session.forward(requests, probe=probe)
    assert session.metadata.shared.slot_T.tolist() == [3, -1, 0, -1]
    assert session.metadata.swa_loc_T.tolist()[1::2] == [-1, -1]
    assert_same(logits[0], sequence.logits[18:19])
    assert_same(logits[2], sequence.logits[11:12])
    for out in attention:
        assert not out[[1, 3]].any(), "attention of a padding token is exactly zero"
    assert [session.slot_bytes(slot) for slot in (1, 2)] == bytes_of_others
    session.assert_guards_intact()


@scenario("F", 20)
@pytest.mark.parametrize("rows", ["last", "all"])
def test_logits_of_requests_without_a_slot_or_without_tokens_are_zero(
    family: type[PoolConfig], rows: Literal["last", "all"]
) -> None:
    sequence = truth(64)
    session = Session(family, slots=4)
    model = Model(config=session.decoder.config, decoder=session.decoder, backend=session.backend)
    first, idle = session.open_all(2)
    batch = ForwardBatch.of([(-1, [5, 6]), (idle, []), (first, sequence.ids[:3])])
    logits = model.forward(batch.padded(num_tokens=8, num_requests=4), rows=rows)
    expected = torch.zeros(4 if rows == "last" else 8, 64)
    if rows == "last":
        expected[2] = sequence.logits[2]
    else:
        expected[2:5] = sequence.logits[:3]
    assert_same(logits, expected)
    nothing = ForwardBatch.of([(-1, []), (idle, [])])
    assert not model.forward(nothing).any()
    assert model.forward(nothing).shape == (2, 64)


@scenario("F", 21)
def test_the_first_three_tokens_read_no_entry_and_no_offset_of_minus_one(
    family: type[PoolConfig],
) -> None:
    sequence = truth(64)
    session = Session(family)
    slot = session.open()
    logits = session.feed_one(slot, sequence.ids[:3])
    assert_same(logits, sequence.logits[:3])
    shared = session.metadata.shared
    for stream in shared.entry_streams.values():
        assert stream.indptr_T1.tolist() == [0, 0, 0, 0]
        assert (stream.indices_N == -1).all()
    assert shared.window_stream.indptr_T1.tolist() == [0, 1, 3, 6]


@scenario("F", 21)
def test_rows_around_the_own_ones_may_hold_nan(family: type[PoolConfig]) -> None:
    """Also the last row of each table, which an index of -1 would read."""
    sequence = truth(64)
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:2])
    for layer in (1, 2):
        view = session.pool.view(layer, Region.ENTRIES)
        last = torch.tensor([view.num_rows - 1])
        assert view.read(last).isnan().all(), "poison of the harness"
    assert_same(session.feed_one(slot, sequence.ids[2:9]), sequence.logits[2:9])


@scenario("F", 22)
def test_rows_of_tokens_without_a_slot_are_defined(family: type[PoolConfig]) -> None:
    """Scratch and outputs are poisoned first; what padding tokens leave there is finite."""
    sequence = truth(64)
    session = Session(family)
    slot = session.open()
    session.feed_one(slot, sequence.ids[:5])
    batch = ForwardBatch.of([(-1, [1, 2]), (slot, [sequence.ids[5]])]).padded(num_tokens=8)
    logits = session.run_batch(batch)
    fresh = session.builder._scratch.tensors["fresh"].view(-1, 64)[:8]
    assert fresh.isfinite().all()
    assert logits.isfinite().all()
    assert_same(logits[2], sequence.logits[5])
