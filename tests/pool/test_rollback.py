"""Rollback and speculation: writes are provisional, a length moves, and the margin is exact (scenarios 3, 4, 55-59)."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsv4.errors import RollbackError
from dsv4.pool.tables import TablePool
from tests.pool.sequences import FAMILIES, check, extend, feed, freeze, make_pool, small_model

families = pytest.mark.parametrize("family", FAMILIES)
MARGINS = [1, 2, 4, 5, 6, 8, 12]
margins = pytest.mark.parametrize("margin", MARGINS)
MODEL = small_model(drafts=0)


@families
@margins
def test_every_accept_count_from_every_phase_leaves_the_exact_state(
    family: type[TablePool], margin: int
) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=margin, max_requests=1)
    for length in range(14, 18):
        for accepted in range(margin + 1):
            slot = pool.acquire()
            pool.reserve(slot, length + margin + 9)
            tokens = extend(pool, slot, [], range(length))
            ids = feed(pool, slot, tokens, range(500, 500 + margin))
            pool.commit(slot, accepted)
            tokens = ids[: length + accepted]
            check(pool, slot, tokens, provisional=True)
            for cut in (1, 1, 3, 4):
                tokens = extend(pool, slot, tokens, range(cut))
                check(pool, slot, tokens, provisional=True)
            pool.release(slot)


@families
@margins
def test_a_rollback_within_the_margin_is_exact_and_one_beyond_is_refused(
    family: type[TablePool], margin: int
) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=margin, max_requests=1)
    for length in (30, 33):
        for undone in range(margin + 1):
            slot = pool.acquire()
            pool.reserve(slot, 70)
            tokens = extend(pool, slot, [], range(length - 5))
            for new in range(5):
                tokens = extend(pool, slot, tokens, [new])
            before = freeze(pool)
            with pytest.raises(RollbackError, match=f"possible is {length - margin} and up"):
                pool.rollback(slot, length - margin - 1)
            assert freeze(pool) == before
            pool.rollback(slot, length - undone)
            tokens = tokens[: length - undone]
            check(pool, slot, tokens, provisional=True)
            tokens = extend(pool, slot, tokens, range(800, 820))
            check(pool, slot, tokens)
            pool.release(slot)


@families
@margins
def test_rollbacks_do_not_add_up_to_more_than_the_margin(
    family: type[TablePool], margin: int
) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=margin, max_requests=1)
    slot = pool.acquire()
    pool.reserve(slot, 60)
    tokens = extend(pool, slot, [], range(40))
    for length in range(39, 39 - margin, -1):
        pool.rollback(slot, length)
        tokens = tokens[:length]
        check(pool, slot, tokens, provisional=True)
    with pytest.raises(RollbackError, match="written up to 40"):
        pool.rollback(slot, 39 - margin)
    # Writing one token again does not bring back what 40 tokens had overwritten.
    tokens = extend(pool, slot, tokens, [7])
    with pytest.raises(RollbackError):
        pool.rollback(slot, 39 - margin)
    check(pool, slot, tokens, provisional=True)


@families
@pytest.mark.parametrize("kind", [int, torch.tensor, np.int64])
def test_slots_and_counts_may_be_tensors_or_numpy_scalars(
    family: type[TablePool], kind: Callable[[int], int]
) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=4)
    slot = pool.acquire()
    pool.reserve(kind(slot), kind(20))
    pool.begin_forward([kind(slot), kind(-1)], [kind(4), kind(2)])
    pool.commit(kind(slot), kind(3))
    pool.rollback(kind(slot), kind(2))
    assert pool.length(kind(slot)) == int(pool.lengths[slot]) == 2
    assert type(pool.length(slot)) is int
    fork, empty = pool.fork(kind(slot)), pool.acquire()
    pool.reserve(empty, 2)
    pool.attach(kind(empty), pool.export(kind(slot)))
    assert [pool.length(s) for s in (fork, empty)] == [2, 2]
    for live in (slot, fork, empty):
        pool.release(kind(live))
    assert (pool.num_free_slots, pool.num_free_pages) == (4, 12)


@families
def test_a_rollback_to_the_length_itself_moves_nothing(family: type[TablePool]) -> None:
    pool = make_pool(family, MODEL)
    slot = pool.acquire()
    pool.rollback(slot, 0)
    pool.reserve(slot, 20)
    tokens = extend(pool, slot, [], range(20))
    pool.rollback(slot, 20)
    check(pool, slot, tokens)


@families
@pytest.mark.parametrize("length", [-1, 21, 40])
def test_a_rollback_to_no_length_of_the_slot_is_refused(
    family: type[TablePool], length: int
) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=40)
    slot = pool.acquire()
    pool.reserve(slot, 20)
    extend(pool, slot, [], range(20))
    with pytest.raises(RollbackError, match=f"rollback to {length} from length 20"):
        pool.rollback(slot, length)
    assert pool.length(slot) == 20


@families
def test_an_attached_slot_cannot_go_below_its_snapshot(family: type[TablePool]) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=4)
    slot, copy = pool.acquire(), pool.acquire()
    pool.reserve(slot, 20)
    tokens = extend(pool, slot, [], range(20))
    pool.reserve(copy, 30)
    pool.attach(copy, pool.export(slot))
    with pytest.raises(RollbackError, match="fixed below 20"):
        pool.rollback(copy, 19)
    extend(pool, copy, tokens, [1, 2])
    with pytest.raises(RollbackError, match="possible is 20 and up"):
        pool.rollback(copy, 19)
    pool.rollback(copy, 20)
    check(pool, copy, tokens, provisional=True)
    pool.rollback(slot, 16)


@families
def test_fifty_rounds_of_uneven_accepts_on_two_slots_stay_exact(family: type[TablePool]) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=4, max_context=300)
    branches: dict[int, list[int]] = {}
    for number in range(2):
        slot = pool.acquire()
        pool.reserve(slot, 300)
        branches[slot] = extend(pool, slot, [], range(100 * number, 100 * number + 9 + number))
    for step in range(50):
        for (slot, tokens), accepted in zip(
            branches.items(), ((1, 4), (4, 1), (2, 3))[step % 3], strict=True
        ):
            new = [10_000 + 100 * step + position for position in range(4)]
            ids = feed(pool, slot, tokens, new)
            pool.commit(slot, accepted)
            branches[slot] = ids[: len(tokens) + accepted]
        for slot, tokens in branches.items():
            check(pool, slot, tokens, provisional=True)


@families
def test_a_first_token_only_accept_every_round_loses_nothing(family: type[TablePool]) -> None:
    pool = make_pool(family, MODEL, in_place_tokens=8, max_context=120, max_requests=1)
    slot, tokens = pool.acquire(), []
    pool.reserve(slot, 120)
    for step in range(3 * 32):
        ids = feed(pool, slot, tokens, [100 * step + position for position in range(8)])
        pool.commit(slot, 1)
        tokens = ids[: len(tokens) + 1]
        check(pool, slot, tokens, provisional=True)
    for _ in range(2):
        tokens = extend(pool, slot, tokens, range(8))
        check(pool, slot, tokens)


@families
def test_a_random_walk_of_forwards_accepts_and_rollbacks_stays_exact(
    family: type[TablePool],
) -> None:
    chance = random.Random(57)
    for margin in MARGINS:
        pool = make_pool(family, MODEL, in_place_tokens=margin, max_context=200, max_requests=2)
        slot, tokens, highest = pool.acquire(), [], 0
        pool.reserve(slot, 200)
        while len(tokens) < 170:
            if chance.random() < 0.25:
                target = len(tokens) - chance.randint(0, margin + 1)
                if target >= 0 and highest - target <= margin:
                    pool.rollback(slot, target)
                    tokens = tokens[:target]
                else:
                    with pytest.raises(RollbackError):
                        pool.rollback(slot, target)
            else:
                number = chance.choice((1, margin, chance.randint(1, 30)))
                ids = feed(pool, slot, tokens, [chance.randrange(10**6) for _ in range(number)])
                highest = max(highest, len(ids))
                accepted = number if number > margin else chance.randint(0, number)
                if highest - len(tokens) - accepted > margin:
                    accepted = number
                pool.commit(slot, accepted)
                tokens = ids[: len(tokens) + accepted]
            check(pool, slot, tokens, provisional=True)
