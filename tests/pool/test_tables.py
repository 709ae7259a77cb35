"""A request's life in either family: slots, pages, lengths, reuse and isolation (scenarios 6-10, 19, 81)."""

import random

import pytest
import torch

from dsv4.errors import ConfigError, Dsv4Error, PoolExhaustedError, SlotError
from dsv4.pool.base import Region
from dsv4.pool.tables import TablePool
from tests.pool.sequences import (
    FAMILIES,
    check,
    check_streams,
    extend,
    feed,
    freeze,
    make_pool,
    slot_memory,
    small_model,
)

families = pytest.mark.parametrize("family", FAMILIES)
FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "fp4")]


@families
@pytest.mark.parametrize(("rows", "keys"), FORMATS)
def test_a_sequence_reads_back_what_it_wrote_however_it_arrived(
    family: type[TablePool], rows: str, keys: str
) -> None:
    pool = make_pool(family, row_format=rows, index_format=keys, in_place_tokens=3)
    for cuts in ([1] * 40, [40], [5, 7, 13, 1, 1, 13], [2, 2, 36], [3] * 13):
        slot, tokens = pool.acquire(), []
        pool.reserve(slot, 40)
        for cut in cuts:
            tokens = extend(pool, slot, tokens, range(len(tokens), len(tokens) + cut))
            check(pool, slot, tokens)
            check_streams(pool, slot, tokens)
        if slot % 2:
            pool.release(slot)


@families
@pytest.mark.parametrize(
    ("ratios", "csa", "window", "page"),
    [((3, 6), 3, 5, 12), ((4, 128), 4, 7, 128), ((2, 0, 10), 2, 1, 30)],
)
def test_ratios_and_windows_need_not_be_powers_of_two(
    family: type[TablePool], ratios: tuple[int, ...], csa: int, window: int, page: int
) -> None:
    model = small_model(ratios, csa=csa, window=window)
    pool = make_pool(family, model, page_tokens=page, max_context=140, in_place_tokens=2)
    slot, tokens = pool.acquire(), []
    pool.reserve(slot, 140)
    for cut in (1, 1, 30, 2, 61, 1, 1, 33, 1):
        tokens = extend(pool, slot, tokens, range(len(tokens), len(tokens) + cut))
        check(pool, slot, tokens)


@families
def test_a_reused_slot_never_shows_old_state(family: type[TablePool]) -> None:
    pool = make_pool(family, max_requests=1, in_place_tokens=2)
    for number, length in enumerate((90, 1, 3, 4, 15, 17, 33)):
        slot, tokens = pool.acquire(), []
        assert slot == 0
        assert pool.length(slot) == int(pool.lengths[slot]) == 0
        assert pool.view(2, Region.ACCUMULATOR).storage[slot, -1] == 0
        pool.reserve(slot, length)
        for position in range(length):
            tokens = extend(pool, slot, tokens, [1000 * number + position])
            check(pool, slot, tokens)
        pool.release(slot)


@families
def test_release_poisons_what_it_frees_when_checks_are_on(
    family: type[TablePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_CHECK", "1")
    pool = make_pool(family, row_format="fp8")
    for tensor in pool.tensors.values():
        tensor.zero_()
    slots = [pool.acquire(), pool.acquire()]
    for slot in slots:
        pool.reserve(slot, 40)
    others = slot_memory(pool, slots[0])
    rows = {
        component.name: [
            *component.rows_of_slot(1),
            *component.rows_of_page(2),
            *component.rows_of_page(3),
        ]
        for component in pool.components()
        if component.format is not None
    }
    pool.release(slots[1])
    for component in pool.components():
        if component.format is not None:
            dead = component.format.export_rows(
                component.storage, torch.tensor(rows[component.name])
            )
            poisoned = dead.isnan() if dead.is_floating_point() else dead == 0x7F
            assert poisoned.all(), component.name
    assert slot_memory(pool, slots[0]) == others
    fork = pool.fork(slots[0])
    pool.release(fork)
    assert slot_memory(pool, slots[0]) == others


@families
def test_one_slot_works_without_a_byte_of_another_moving(family: type[TablePool]) -> None:
    pool = make_pool(family, row_format="fp8", index_format="fp4", in_place_tokens=2)
    sleeper, worker = pool.acquire(), pool.acquire()
    pool.reserve(sleeper, 50)
    asleep = extend(pool, sleeper, [], range(50))
    pool.reserve(worker, 70)
    tokens = extend(pool, worker, [], range(100, 137))
    snapshot = pool.export(worker)
    before = slot_memory(pool, sleeper)
    tokens = extend(pool, worker, tokens, range(20))
    pool.rollback(worker, 55)
    tokens = extend(pool, worker, tokens[:55], [7, 8, 9])
    fork = pool.fork(worker)
    extend(pool, fork, tokens, [5])
    pool.release(worker)
    again = pool.acquire()
    pool.reserve(again, 60)
    pool.attach(again, snapshot)
    extend(pool, again, [*range(100, 137)], [1, 2, 3])
    pool.release(fork)
    assert slot_memory(pool, sleeper) == before
    check(pool, sleeper, asleep)


@families
def test_reserve_gives_pages_for_every_position_and_keeps_them(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot = pool.acquire()
    for total, pages in ((0, 0), (1, 1), (32, 1), (33, 2), (5, 2), (96, 3)):
        pool.reserve(slot, total)
        held = [page for page in pool.block_table[slot].tolist() if page >= 0]
        assert len(held) == pages == 12 - pool.num_free_pages
    assert pool.block_table[slot].tolist() == [0, 1, 2]
    assert pool.block_table[1:].eq(-1).all()
    pool.release(slot)
    assert pool.block_table.eq(-1).all()
    assert pool.num_free_pages == 12


@families
def test_a_context_that_fills_no_page_exactly_is_still_reachable(family: type[TablePool]) -> None:
    pool = make_pool(family, max_context=33, max_requests=1)
    slot = pool.acquire()
    pool.reserve(slot, 33)
    tokens = extend(pool, slot, [], range(33))
    check(pool, slot, tokens)
    with pytest.raises(SlotError, match="34 tokens asked for, max_context is 33"):
        pool.reserve(slot, 34)


@families
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_pool_without_entries_counts_tokens_alone(
    family: type[TablePool], num_tokens: int
) -> None:
    pool = make_pool(family, small_model((0, 0)), max_requests=1)
    slot = pool.acquire()
    pool.reserve(slot, num_tokens)
    tokens = extend(pool, slot, [], range(num_tokens))
    check(pool, slot, tokens)
    with pytest.raises(SlotError, match=f"{num_tokens} tokens reserved"):
        pool.begin_forward([slot], [1])


def failing_calls(pool: TablePool) -> list[tuple[type[Dsv4Error], str, object]]:
    """Calls on the pool of the test below that must fail: error, part of its message, call."""
    other = make_pool(type(pool), in_place_tokens=2, row_format="bf16")
    slot = other.acquire()
    other.reserve(slot, 10)
    extend(other, slot, [], range(10))
    misfit, spent = other.export(slot), pool.export(0)
    pool.drop(spent)
    return [
        (PoolExhaustedError, "all 3 are in use", lambda: pool.acquire()),
        (PoolExhaustedError, "needs 2 more pages, 1 of 5", lambda: pool.reserve(2, 33)),
        (SlotError, "max_context is 96", lambda: pool.reserve(0, 97)),
        (SlotError, "slot 3: not live", lambda: pool.reserve(3, 1)),
        (SlotError, "slot -1: not live", lambda: pool.release(-1)),
        (SlotError, "slot 7: not live", lambda: pool.fork(7)),
        (PoolExhaustedError, "all 3 are in use", lambda: pool.fork(0)),
        (SlotError, "slot 7: not live", lambda: pool.export(7)),
        (Dsv4Error, "row_format is bf16, the pool has fp32", lambda: pool.attach(2, misfit)),
        (Dsv4Error, "was dropped", lambda: pool.attach(2, spent)),
        (Dsv4Error, "dropped already", lambda: pool.drop(spent)),
        (SlotError, "has 40 tokens", lambda: pool.attach(0, pool.export(1))),
        (SlotError, "0 tokens reserved", lambda: pool.attach(2, pool.export(1))),
        (SlotError, "do not fit", lambda: pool.begin_forward([1, 0], [1, 30])),
        (SlotError, "do not fit", lambda: pool.begin_forward([0], [-1])),
        (SlotError, "slot 5: not live", lambda: pool.begin_forward([1, 5], [1, 1])),
        (SlotError, "given twice", lambda: pool.begin_forward([1, 1], [1, 1])),
        (SlotError, "0..0 were begun", lambda: pool.commit(0, 1)),
        (SlotError, "committing -1 tokens", lambda: pool.commit(0, -1)),
        (Dsv4Error, "possible is 38 and up", lambda: pool.rollback(0, 37)),
        (Dsv4Error, "rollback to 41", lambda: pool.rollback(0, 41)),
        (ConfigError, "no region", lambda: pool.view(0, Region.INDEX)),
    ]


@families
@pytest.mark.parametrize("number", range(22))
def test_a_failing_call_changes_nothing(family: type[TablePool], number: int) -> None:
    pool = make_pool(family, max_requests=3, num_pages=5, in_place_tokens=2)
    for length in (40, 40, 0):
        slot = pool.acquire()
        pool.reserve(slot, length + (5 if length else 0))
        if length:
            extend(pool, slot, [], range(length))
    calls = failing_calls(pool)
    assert len(calls) == 22
    error, message, call = calls[number]
    before = freeze(pool)
    with pytest.raises(error, match=message):
        call()
    assert freeze(pool) == before


@families
def test_idle_entries_of_a_batch_are_skipped(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot = pool.acquire()
    pool.begin_forward([-1, slot, 3, -1], [4, 0, 0, 0])
    with pytest.raises(SlotError, match=r"0\.\.0 were begun"):
        pool.commit(slot, 1)


@families
def test_a_chunk_that_was_never_committed_closes_the_slot(family: type[TablePool]) -> None:
    pool = make_pool(family, in_place_tokens=2)
    slot = pool.acquire()
    pool.reserve(slot, 40)
    tokens = extend(pool, slot, [], range(20))
    feed(pool, slot, tokens, range(3))
    for call in (
        lambda: pool.begin_forward([slot], [1]),
        lambda: pool.export(slot),
        lambda: pool.fork(slot),
    ):
        with pytest.raises(
            SlotError, match="positions up to 23 were written and only 2 can be undone"
        ):
            call()
    pool.commit(slot, 1)
    check(pool, slot, [*tokens, 0], provisional=True)
    pool.fork(slot)


@families
def test_the_version_moves_with_every_change(family: type[TablePool]) -> None:
    pool = make_pool(family, in_place_tokens=4)
    seen = [pool.version]

    def moved() -> bool:
        seen.append(pool.version)
        return seen[-1] > seen[-2]

    slot = pool.acquire()
    assert moved()
    pool.reserve(slot, 33)
    assert moved()
    pool.begin_forward([slot], [5])
    pool.commit(slot, 5)
    assert moved()
    pool.rollback(slot, 3)
    assert moved()
    snapshot = pool.export(slot)
    pool.fork(slot)
    assert moved()
    target = pool.acquire()
    pool.reserve(target, 3)
    moved()
    pool.attach(target, snapshot)
    assert moved()
    pool.release(slot)
    assert moved()


@families
def test_commit_writes_the_length_that_the_host_knows(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot = pool.acquire()
    pool.reserve(slot, 10)
    pool.begin_forward([slot], [4])
    pool.lengths[slot] += 4  # the device may have been advanced already
    pool.commit(slot, 4)
    assert int(pool.lengths[slot]) == pool.length(slot) == 4


@families
def test_ten_thousand_random_operations_return_every_slot_and_page(
    family: type[TablePool],
) -> None:
    chance = random.Random(81)
    pool = make_pool(family, max_requests=5, num_pages=9, in_place_tokens=3)
    tables = make_pool(family, max_requests=5, num_pages=9, in_place_tokens=3)
    live: dict[int, int] = {}
    snapshots = []
    counts = dict.fromkeys(("done", "refused"), 0)
    for _ in range(10_000):
        action = chance.choice(
            (
                "acquire",
                "reserve",
                "forward",
                "fork",
                "export",
                "attach",
                "drop",
                "release",
                "rollback",
            )
        )
        slot = chance.choice([*live, 9])
        total = chance.randint(0, 100)
        try:
            if action == "acquire":
                live[pool.acquire()] = 0
            elif action == "reserve":
                pool.reserve(slot, total)
            elif action == "forward":
                pool.begin_forward([slot], [total // 4])
                pool.commit(slot, total // 4)
            elif action == "fork":
                live[pool.fork(slot)] = pool.length(slot)
            elif action == "export" and len(snapshots) < 6:
                snapshots.append(pool.export(slot))
            elif action == "attach" and snapshots:
                pool.attach(slot, chance.choice(snapshots))
            elif action == "drop" and snapshots:
                pool.drop(snapshots.pop(chance.randrange(len(snapshots))))
            elif action == "release":
                pool.release(slot)
                del live[slot]
            elif action == "rollback":
                pool.rollback(slot, max(0, pool.length(slot) - chance.randint(0, 4)))
            counts["done"] += 1
        except Dsv4Error:
            counts["refused"] += 1
        assert pool.num_free_slots == 5 - len(live)
        held = [page for book in pool._books.values() for page in book.pages]
        assert pool.num_free_pages == 9 - len(set(held))
    assert min(counts.values()) > 1_000
    for slot in list(live):
        pool.release(slot)
    assert (pool.num_free_slots, pool.num_free_pages) == (5, 9)
    assert freeze(pool)["slots"] == freeze(tables)["slots"]
    assert freeze(pool)["pages"] == freeze(tables)["pages"]


@families
def test_two_hundred_random_requests_on_six_slots_each_read_their_own(
    family: type[TablePool],
) -> None:
    chance = random.Random(8)
    pool = make_pool(family, small_model(drafts=0), max_requests=6, in_place_tokens=2)
    live: dict[int, list[int]] = {}
    for number in range(200):
        if len(live) == 6 or (live and chance.random() < 0.3):
            gone = chance.choice(list(live))
            pool.release(gone)
            del live[gone]
        slot = pool.acquire()
        pool.reserve(slot, 60)
        prompt = [1000 * number + position for position in range(chance.randint(1, 20))]
        live[slot] = extend(pool, slot, [], prompt)
        for slot, tokens in live.items():
            if len(tokens) < 50:
                new = [chance.randrange(10**6) for _ in range(chance.choice((1, 2, 5)))]
                live[slot] = extend(pool, slot, tokens, new)
            check(pool, slot, live[slot])
