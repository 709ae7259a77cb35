"""Slots and pages, against books kept in plain sets."""

import random

import pytest

from dsv4.errors import PoolExhaustedError, SlotError
from dsv4.pool.allocator import PageAllocator, SlotAllocator


def test_the_lowest_free_slot_is_acquired() -> None:
    slots = SlotAllocator(3)
    assert [slots.acquire() for _ in range(3)] == [0, 1, 2]
    slots.release(2)
    slots.release(0)
    assert [slots.acquire(), slots.acquire()] == [0, 2]


def test_a_full_house_raises_and_changes_nothing() -> None:
    slots = SlotAllocator(1)
    slots.acquire()
    with pytest.raises(PoolExhaustedError, match=r"all 1 are in use.*raise max_requests"):
        slots.acquire()
    assert slots.num_free == 0
    slots.release(0)
    assert slots.acquire() == 0


@pytest.mark.parametrize("slot", [-1, 0, 2, 3])
def test_a_slot_that_is_not_live_is_refused(slot: int) -> None:
    slots = SlotAllocator(3)
    slots.acquire()
    slots.acquire()
    slots.release(0)
    with pytest.raises(SlotError, match=f"slot {slot}: not live"):
        slots.release(slot)
    assert slots.num_free == 2


def test_each_release_starts_a_new_generation() -> None:
    slots = SlotAllocator(2)
    for generation in range(3):
        assert slots.generation(0) == generation
        slots.acquire()
        slots.release(0)
    assert slots.generation(1) == 0


def test_pages_are_allocated_all_or_none() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(3, purpose="test") == [0, 1, 2]
    with pytest.raises(PoolExhaustedError, match="test needs 2 more pages, 1 of 4 are free"):
        pages.allocate(2, purpose="test")
    assert pages.num_free == 1
    assert pages.allocate(0, purpose="test") == []
    assert pages.allocate(1, purpose="test") == [3]


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(2, purpose="test")
    pages.share([0])
    assert pages.holders(0) == 2
    assert pages.release(held) == [1]
    assert pages.num_free == 1
    assert pages.release([0]) == [0]
    assert pages.num_free == 2


def test_random_use_of_pages_agrees_with_a_list_of_holders() -> None:
    chance = random.Random(7)
    pages, held = PageAllocator(12), []
    for _ in range(3_000):
        free = 12 - len({page for group in held for page in group})
        assert pages.num_free == free
        action = chance.choice(("allocate", "share", "release"))
        if action == "allocate":
            number = chance.randint(0, 5)
            if number > free:
                with pytest.raises(PoolExhaustedError):
                    pages.allocate(number, purpose="test")
            else:
                group = pages.allocate(number, purpose="test")
                assert not set(group) & {page for other in held for page in other}
                held.append(group)
        elif held and action == "share":
            group = list(chance.choice(held))
            pages.share(group)
            held.append(group)
        elif held:
            group = held.pop(chance.randrange(len(held)))
            left = {page for other in held for page in other}
            assert sorted(pages.release(group)) == sorted(set(group) - left)
