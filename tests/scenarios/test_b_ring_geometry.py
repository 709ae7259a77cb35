"""Class B: rings hold every row that is still visible, also behind provisional tokens; no row is unreachable."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dsv4.config import PoolConfig, ThreePoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.base import Region
from dsv4.pool.geometry import PoolGeometry
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


def geometry(**changes: int) -> PoolGeometry:
    sizes = {
        "max_requests": 3,
        "window": 16,
        "in_place_tokens": 4,
        "ring_rows": 19,
        "page_tokens": 32,
        "pages_per_slot": 2,
        "num_pages": 6,
    }
    return PoolGeometry(**(sizes | changes))


@scenario("B", 3)
def test_a_window_ring_of_just_the_window_is_refused_for_drafts() -> None:
    for rows in (16, 18):
        with pytest.raises(ConfigError, match=f"ring_rows {rows}.*at least 19 rows"):
            geometry(ring_rows=rows)
    assert geometry(ring_rows=19).ring_rows == 19
    assert geometry(ring_rows=16, in_place_tokens=1).ring_rows == 16


@scenario("B", 3)
def test_the_first_of_four_verified_tokens_still_sees_its_whole_window(
    family: type[PoolConfig],
) -> None:
    sequence, length = truth(64), 16 + 5
    session = Session(family, depth=4)
    assert session.pool.geometry.ring_rows == 16 + 4 - 1
    slots = session.open_all(3)
    session.feed([(slot, sequence.ids[:length]) for slot in slots])
    logits = session.forward([(slot, sequence.ids[length : length + 4]) for slot in slots])
    for slot, rows in zip(slots, logits, strict=True):
        assert_same(rows, sequence.logits[length : length + 4])
        oldest = session.window_rows(slot, 0, range(length - 15, length + 4))
        assert_same(oldest, sequence.run.window_kv[0][length - 15 : length + 4])


@scenario("B", 4)
@pytest.mark.parametrize("depth", [1, 2, 4, 5, 6, 8, 12])
def test_every_accept_count_at_every_phase_leaves_the_following_closes_right(
    family: type[PoolConfig], depth: int
) -> None:
    """One slot per (accepted 1..D, start phase 0..3); the rejected tokens are wrong ones. Starts of 14..17 put the
    close of a 16-token window into the round, too."""
    cases = [(accept, phase) for accept in range(1, depth + 1) for phase in range(4)]
    sequence = truth(64, seed=3)
    session = Session(family, slots=len(cases), context=64, depth=depth, max_tokens=1024)
    slots = session.open_all(len(cases))
    starts = [14 + phase for _, phase in cases]
    session.feed([(slot, sequence.ids[:n]) for slot, n in zip(slots, starts, strict=True)])
    rounds = []
    for slot, n, (accept, _) in zip(slots, starts, cases, strict=True):
        true = list(sequence.ids[n : n + accept])
        rounds.append((slot, true + sequence.wrong(n + accept, depth - accept)))
    verified = session.verify(rounds, [accept for accept, _ in cases])
    at = [n + accept for n, (accept, _) in zip(starts, cases, strict=True)]
    for logits, n, end in zip(verified, starts, at, strict=True):
        assert_same(logits[: end - n], sequence.logits[n:end])
    for _ in range(9):
        step = session.feed([(s, sequence.ids[p : p + 1]) for s, p in zip(slots, at, strict=True)])
        assert_same(torch.cat(step), sequence.logits[at])
        at = [p + 1 for p in at]
    for slot, end in zip(slots, at, strict=True):
        for layer, region, rows in (
            (1, Region.ENTRIES, sequence.run.entries[1]),
            (1, Region.INDEX, sequence.run.index_keys[1]),
            (2, Region.ENTRIES, sequence.run.entries[2]),
        ):
            count = end // session.pool.model.layers[layer].ratio
            assert_same(session.entry_rows(slot, layer, region, count), rows[:count])
    session.assert_guards_intact()


@scenario("B", 4)
@pytest.mark.parametrize("depth", [1, 2, 4, 5, 6, 8, 12])
def test_the_state_ring_of_an_overlapping_window_has_two_windows_and_the_rollback_margin(
    depth: int,
) -> None:
    """2m + D - 1 rows, for ratio 4 D + 7: no config can ask for fewer."""
    found = geometry(in_place_tokens=depth, ring_rows=16 + depth - 1)
    assert found.overlap_rows(4) == depth + 7
    pool = Session(ThreePoolConfig, depth=depth, slots=2).pool
    state = next(c for c in pool.components() if c.name == "layer1.state")
    assert state.rows_per_slot == depth + 7


@scenario("B", 5)
@pytest.mark.parametrize("page", [32, 64, 256])
@pytest.mark.parametrize("window", [16, 128])
def test_the_image_of_every_address_map_is_exactly_the_allocation(
    family: type[PoolConfig], page: int, window: int
) -> None:
    decoder = tiny_decoder(sliding_window=window)
    pool = Session(family, decoder, slots=3, depth=3, context=2 * page, page=page).pool
    found, slots = pool.geometry, range(3)
    positions = range(2 * found.ring_rows)
    rings = {found.window_row(slot, p) for slot in slots for p in positions}
    assert rings == set(range(3 * (window + 2)))
    for layer, ratio in ((1, 4), (2, 16)):
        entries = Counter(
            found.entry_row(ratio, number, entry)
            for number in range(found.num_pages)
            for entry in range(page // ratio)
        )
        rows = pool.view(layer, Region.ENTRIES).num_rows
        base = len(rings) if found.entry_base else 0
        assert entries == Counter(range(base, rows))
    states = Counter(found.overlap_row(4, slot, p) for slot in slots for p in range(10))
    assert states == Counter(range(pool.view(1, Region.STATE).num_rows))
    raws = Counter(found.fold_row(slot, p) for slot in slots for p in range(3))
    assert raws == Counter(range(pool.view(2, Region.STATE).num_rows))
