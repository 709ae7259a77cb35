"""How long calls take: the abstract timer, and the wall clock for devices without CUDA graphs."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

Call = Callable[[], object]
"""One call of an op on inputs of its own, its output included: no other call touches them."""


class Timer(ABC):
    """Times calls that are alike but share no inputs, so that none finds its data in a cache."""

    method: ClassVar[str]
    """One line for the record."""
    max_calls: ClassVar[int]
    """How many calls it can use."""

    @abstractmethod
    def samples(self, calls: Sequence[Call]) -> list[float]:
        """Microseconds per call, one value per repeat over all calls."""

    def microseconds(self, calls: Sequence[Call]) -> float:
        """The median repeat."""
        return statistics.median(self.samples(calls))


class WallClock(Timer):
    """Host time of calls that return when their work is done."""

    method: ClassVar[str] = (
        "wall clock of small shapes: shows that the benchmark works, not how fast a kernel is"
    )
    max_calls: ClassVar[int] = 2
    repeats: ClassVar[int] = 3

    def samples(self, calls: Sequence[Call]) -> list[float]:
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            for call in calls:
                call()
            times.append((time.perf_counter() - start) * 1e6 / len(calls))
        return times
