"""Forks: full pages shared, everything else copied, and neither side sees the other (scenarios 6, 65)."""

import pytest

from dsv4.errors import PoolExhaustedError, RollbackError, SlotError
from dsv4.pool.tables import TablePool
from tests.pool.sequences import (
    FAMILIES,
    check,
    check_streams,
    extend,
    feed,
    freeze,
    make_pool,
    small_model,
)

families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("length", [1, 3, 10, 16, 31, 32, 33, 47, 64, 70])
def test_two_branches_grow_apart_and_each_reads_its_own(
    family: type[TablePool], length: int
) -> None:
    pool = make_pool(family, row_format="fp8", index_format="fp4", in_place_tokens=3)
    slot = pool.acquire()
    pool.reserve(slot, 96)
    tokens = extend(pool, slot, [], range(length))
    fork = pool.fork(slot)
    check(pool, fork, tokens)
    check_streams(pool, fork, tokens)
    pool.reserve(fork, 96)
    branches = {slot: tokens, fork: tokens}
    for step, cut in enumerate((1, 2, 1, 5, 3, 1, 9)):
        for number, branch in enumerate(branches):
            new = [1000 * number + 50 * step + position for position in range(cut)]
            branches[branch] = extend(pool, branch, branches[branch], new)
            check(pool, branch, branches[branch])
        for branch, own in branches.items():
            check(pool, branch, own)
    pool.release(slot)
    check(pool, fork, branches[fork])


@families
def test_full_pages_are_shared_and_the_last_one_is_copied(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot = pool.acquire()
    pool.reserve(slot, 96)
    extend(pool, slot, [], range(70))
    fork = pool.fork(slot)
    assert pool.block_table[slot].tolist() == [0, 1, 2]
    assert pool.block_table[fork].tolist() == [0, 1, 3]
    assert pool.num_free_pages == 8
    pool.release(slot)
    assert pool.num_free_pages == 9
    pool.release(fork)
    assert pool.num_free_pages == 12


@families
def test_a_fork_on_a_page_boundary_takes_no_page(family: type[TablePool]) -> None:
    pool = make_pool(family, num_pages=3)
    slot = pool.acquire()
    pool.reserve(slot, 96)
    tokens = extend(pool, slot, [], range(64))
    fork = pool.fork(slot)
    assert pool.block_table[fork].tolist() == [0, 1, -1]
    assert pool.num_free_pages == 0
    check(pool, fork, tokens)
    with pytest.raises(PoolExhaustedError):
        pool.reserve(fork, 65)


@families
def test_a_fork_reserves_for_itself_beyond_its_pages(family: type[TablePool]) -> None:
    pool = make_pool(family, max_context=80)
    slot = pool.acquire()
    pool.reserve(slot, 80)
    extend(pool, slot, [], range(20))
    fork = pool.fork(slot)
    with pytest.raises(SlotError, match="do not fit the 32 tokens reserved"):
        pool.begin_forward([fork], [13])
    pool.reserve(fork, 80)
    pool.begin_forward([slot, fork], [60, 60])


@families
def test_a_fork_without_a_free_page_changes_nothing(family: type[TablePool]) -> None:
    pool = make_pool(family, num_pages=2)
    slot = pool.acquire()
    pool.reserve(slot, 40)
    extend(pool, slot, [], range(40))
    before = freeze(pool)
    with pytest.raises(PoolExhaustedError, match="forking 40 tokens needs 1 more pages, 0 of 2"):
        pool.fork(slot)
    assert freeze(pool) == before


@families
@pytest.mark.parametrize("length", [31, 32, 33, 35])
def test_neither_side_rolls_back_into_shared_pages(family: type[TablePool], length: int) -> None:
    pool = make_pool(family, in_place_tokens=6)
    slot = pool.acquire()
    pool.reserve(slot, 60)
    tokens = extend(pool, slot, [], range(length))
    fork = pool.fork(slot)
    lowest = max(length // 32 * 32, length - 6)
    for branch in (slot, fork):
        with pytest.raises(RollbackError, match=f"possible is {lowest} and up"):
            pool.rollback(branch, lowest - 1)
        pool.rollback(branch, lowest)
        check(pool, branch, tokens[:lowest], provisional=True)
        pool.reserve(branch, 60)
        extend(pool, branch, tokens[:lowest], range(500, 520 + branch))


@families
def test_provisional_tokens_of_the_source_do_not_reach_the_fork(family: type[TablePool]) -> None:
    for margin in (1, 4, 12):
        pool = make_pool(family, in_place_tokens=margin)
        for length in (14, 16, 17, 30, 31, 32, 33):
            slot = pool.acquire()
            pool.reserve(slot, 60)
            tokens = extend(pool, slot, [], range(length))
            feed(pool, slot, tokens, range(900, 900 + margin))
            fork = pool.fork(slot)
            pool.reserve(fork, 60)
            check(pool, fork, tokens, provisional=True)
            for branch in (slot, fork):
                own = extend(pool, branch, tokens, range(branch, branch + 15))
                check(pool, branch, own)
            check(pool, fork, [*tokens, *range(fork, fork + 15)])
            pool.release(slot)
            pool.release(fork)


@families
@pytest.mark.parametrize("length", [29, 31, 32])
def test_a_fork_commits_provisional_tokens_of_its_source(
    family: type[TablePool], length: int
) -> None:
    """Also those that lie on pages behind the committed ones."""
    pool = make_pool(family, in_place_tokens=8)
    slot = pool.acquire()
    pool.reserve(slot, 60)
    tokens = feed(pool, slot, extend(pool, slot, [], range(length)), range(900, 908))
    fork = pool.fork(slot)
    for branch in (slot, fork):
        pool.commit(branch, 8)
        check(pool, branch, tokens)
    pool.reserve(fork, 60)
    check(pool, fork, extend(pool, fork, tokens, range(10)))
    check(pool, slot, tokens)


@families
def test_a_fork_has_overwritten_what_its_source_has(family: type[TablePool]) -> None:
    pool = make_pool(family, in_place_tokens=4)
    slot = pool.acquire()
    pool.reserve(slot, 30)
    tokens = extend(pool, slot, [], range(20))
    feed(pool, slot, tokens, [1, 2, 3])
    fork = pool.fork(slot)
    for branch in (slot, fork):
        with pytest.raises(RollbackError, match=r"possible is 19 and up .written up to 23"):
            pool.rollback(branch, 18)
        pool.rollback(branch, 19)
        check(pool, branch, tokens[:19], provisional=True)


@families
def test_forks_of_forks_share_on(family: type[TablePool]) -> None:
    pool = make_pool(family, small_model(drafts=0), max_requests=6, num_pages=10)
    slots = [pool.acquire()]
    pool.reserve(slots[0], 64)
    tokens = extend(pool, slots[0], [], range(64))
    slots += [pool.fork(slots[0]), pool.fork(slots[0])]
    slots.append(pool.fork(slots[2]))
    assert pool.num_free_pages == 8
    for slot in slots[:3]:
        pool.release(slot)
    check(pool, slots[3], tokens)
    assert pool.num_free_pages == 8
    pool.release(slots[3])
    assert pool.num_free_pages == 10
