"""Who holds what, on the host: slots, and pages with a reference count.

Both hand out the lowest free number, so a run is reproducible and a pool that empties fills again from the front.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from dsv4.errors import PoolExhaustedError, SlotError


class SlotAllocator:
    """The numbers 0 .. max_requests - 1, each held by at most one request."""

    def __init__(self, max_requests: int) -> None:
        self._free = list(range(max_requests))
        self._live = [False] * max_requests
        self._generation = [0] * max_requests

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_live(self, slot: int) -> bool:
        return 0 <= slot < len(self._live) and self._live[slot]

    def generation(self, slot: int) -> int:
        """How many owners of this slot have come and gone."""
        return self._generation[slot]

    def acquire(self) -> int:
        """The lowest free slot; PoolExhaustedError if there is none."""
        if not self._free:
            raise PoolExhaustedError(
                f"slots: all {len(self._live)} are in use; release one or raise max_requests"
            )
        slot = heapq.heappop(self._free)
        self._live[slot] = True
        return slot

    def release(self, slot: int) -> None:
        self.require(slot)
        self._live[slot] = False
        self._generation[slot] += 1
        heapq.heappush(self._free, slot)

    def require(self, slot: int) -> None:
        """Raise SlotError unless the slot is live."""
        if not self.is_live(slot):
            raise SlotError(
                f"slot {slot}: not live; slots are 0..{len(self._live) - 1} and must be acquired first"
            )


class PageAllocator:
    """The pages 0 .. num_pages - 1, each held by any number of slots; free when nobody holds it."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """Slots that hold the page."""
        return self._holders[page]

    def allocate(self, num_pages: int, *, purpose: str) -> list[int]:
        """`num_pages` free pages with one holder each, all or nothing; `purpose` opens the error message."""
        self.require(num_pages, purpose=purpose)
        pages = [heapq.heappop(self._free) for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def require(self, num_pages: int, *, purpose: str) -> None:
        """Raise PoolExhaustedError unless that many pages are free."""
        if num_pages > len(self._free):
            raise PoolExhaustedError(
                f"{purpose} needs {num_pages} more pages, {len(self._free)} of {len(self._holders)} are free; "
                f"release a slot or raise num_pages"
            )

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page; every page must be held already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """One holder less for each page; returns those that became free."""
        freed = []
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                heapq.heappush(self._free, page)
                freed.append(page)
        return freed
