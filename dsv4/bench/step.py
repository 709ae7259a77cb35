"""Speed of whole steps: prefill of a prompt, then decoding behind it, at several lengths and batch sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import field, frozen

from dsv4.config.checks import integer
from dsv4.engine.engine import Engine
from dsv4.errors import ConfigError

WARMUP_STEPS = 2


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen(kw_only=True)
class StepBench:
    """What is measured. Token ids are random: the time of a step does not depend on them."""

    lengths: tuple[int, ...] = field(default=(1024, 4096, 32_768), converter=_counts)
    """Prompt lengths in tokens."""
    batches: tuple[int, ...] = field(default=(1, 8), converter=_counts)
    """Requests that decode together, each behind a prompt of its own."""
    steps: int = field(default=16, validator=integer(least=1))
    """Decode steps of one measurement."""
    repeats: int = field(default=5, validator=integer(least=1))
    """Measurements; the median is reported."""
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if not self.lengths or not self.batches or min(*self.lengths, *self.batches, 1) < 1:
            raise ConfigError(
                f"lengths {self.lengths}, batches {self.batches}: at least one of each, all at least 1; "
                "give other values"
            )

    @property
    def max_context(self) -> int:
        """Tokens that the longest request reaches."""
        return max(self.lengths) + WARMUP_STEPS + self.steps * self.repeats

    def run(self, engine: Engine) -> Iterator[dict[str, object]]:
        """One row per length for prefill, one per length and batch for decoding."""
        chance = torch.Generator().manual_seed(self.seed)
        for length in self.lengths:
            token_ids = torch.randint(
                engine.model.config.vocab_size, (length,), generator=chance
            ).tolist()
            yield self._prefill(engine, token_ids)
            for batch in self.batches:
                yield self._decode(engine, token_ids, batch)

    def _prefill(self, engine: Engine, token_ids: Sequence[int]) -> dict[str, object]:
        def once() -> None:
            slot = engine.pool.acquire()
            engine.prefill(slot, token_ids)
            engine.pool.release(slot)

        seconds = [_timed(engine, once) for _ in range(self.repeats)]
        return _row("prefill", 1, len(token_ids), len(token_ids), seconds)

    def _decode(self, engine: Engine, token_ids: Sequence[int], batch: int) -> dict[str, object]:
        pool = engine.pool
        slots = [pool.acquire() for _ in range(batch)]
        try:
            engine.prefill(slots[0], token_ids)
            # Copies, not forks: requests that shared pages would share their cache lines too.
            snapshot = pool.export(slots[0])
            for slot in slots[1:]:
                pool.reserve(slot, snapshot.length)
                pool.attach(slot, snapshot)
            pool.drop(snapshot)
            next_ids = [token_ids[slot % len(token_ids)] for slot in slots]

            def steps(num_steps: int) -> None:
                for _ in range(num_steps):
                    engine.decode(slots, next_ids)

            steps(WARMUP_STEPS)
            seconds = [_timed(engine, lambda: steps(self.steps)) for _ in range(self.repeats)]
        finally:
            for slot in slots:
                pool.release(slot)
        return _row("decode", batch, len(token_ids), batch * self.steps, seconds)


def _timed(engine: Engine, work: Callable[[], None]) -> float:
    _wait(engine.pool.device)
    start = time.perf_counter()
    work()
    _wait(engine.pool.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    what: str, batch: int, length: int, num_tokens: int, seconds: Sequence[float]
) -> dict[str, object]:
    median = statistics.median(seconds)
    return {
        "what": what,
        "batch": batch,
        "prompt_tokens": length,
        "tokens_per_second": round(num_tokens / median, 2),
        "seconds": round(median, 6),
        "seconds_least": round(min(seconds), 6),
        "seconds_most": round(max(seconds), 6),
        "repeats": len(seconds),
    }
