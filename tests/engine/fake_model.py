"""A model without weights: its logits are a function of the tokens that the pool says are committed.

It keeps tokens by (slot, position), as a pool would, and reads them back by length. A step that commits
too much or too little, uses a wrong slot, or skips a token therefore gives other logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import attrs
import torch

from dsv4.config import BackendConfig, ModelConfig, UnifiedPoolConfig
from dsv4.errors import PoolExhaustedError, SlotError
from dsv4.metadata.batch import ForwardBatch
from dsv4.tokenizer import ByteTokenizer

VOCAB = 258
EOS = 257
Logits = Callable[[Sequence[int]], torch.Tensor]


def hashed_logits(history: Sequence[int]) -> torch.Tensor:
    """Logits [V] that depend on every token of the history and on their order."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(list(history)).encode()))
    return 3 * torch.randn(VOCAB, generator=generator)


def scripted_logits(*texts: str) -> Logits:
    """A model that knows a few texts by heart, and ends each with EOS."""
    scripts = [[*text.encode(), EOS] for text in texts]

    def logits(history: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        for script in scripts:
            if list(history) == script[: len(history)] and len(history) < len(script):
                row[script[len(history)]] = 9.0
        return row

    return logits


class FakePool:
    """Slots, pages and lengths, with the calls that the engine makes."""

    def __init__(self, config: UnifiedPoolConfig, num_pages: int, page_tokens: int) -> None:
        self.config = config
        pages_per_slot = -(-config.max_context // page_tokens)
        self.geometry = SimpleNamespace(
            num_pages=num_pages, page_tokens=page_tokens, pages_per_slot=pages_per_slot
        )
        self._free_slots = list(range(config.max_requests))
        self._lengths: dict[int, int] = {}
        self._pages: dict[int, int] = {}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_free_pages(self) -> int:
        return self.geometry.num_pages - sum(self._pages.values())

    def acquire(self) -> int:
        if not self._free_slots:
            raise PoolExhaustedError("slots: none free")
        slot = self._free_slots.pop()
        self._lengths[slot] = self._pages[slot] = 0
        return slot

    def reserve(self, slot: int, total_tokens: int) -> None:
        if slot not in self._lengths or total_tokens > self.config.max_context:
            raise SlotError(f"slot {slot}: cannot hold {total_tokens} tokens")
        need = -(-total_tokens // self.geometry.page_tokens) - self._pages[slot]
        if need > self.num_free_pages:
            raise PoolExhaustedError(f"slot {slot}: needs {need} pages")
        self._pages[slot] += max(0, need)

    def release(self, slot: int) -> None:
        del self._lengths[slot], self._pages[slot]
        self._free_slots.append(slot)

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def commit(self, slot: int, num_tokens: int) -> None:
        self._lengths[slot] += num_tokens

    def holds(self, slot: int, total_tokens: int) -> bool:
        return total_tokens <= self._pages[slot] * self.geometry.page_tokens


class FakeModel:
    """Implements ModelRunner on a FakePool, and records every batch."""

    def __init__(
        self,
        logits: Logits = hashed_logits,
        *,
        max_requests: int = 4,
        max_context: int = 256,
        num_pages: int = 64,
        page_tokens: int = 16,
        max_batch_tokens: int = 64,
        tokenizer: ByteTokenizer | None = None,
    ) -> None:
        pool_config = UnifiedPoolConfig(max_requests=max_requests, max_context=max_context)
        self.config = attrs.evolve(ModelConfig.preset("tiny"), vocab_size=VOCAB, eos_token_id=EOS)
        backend_config = BackendConfig(pool=pool_config, max_batch_tokens=max_batch_tokens)
        self.backend = SimpleNamespace(
            pool=FakePool(pool_config, num_pages, page_tokens),
            config=backend_config.resolved(self.config),
        )
        self.tokenizer = tokenizer
        self.batches: list[ForwardBatch] = []
        self.fail_next: BaseException | None = None
        self._logits = logits
        self._tokens: dict[tuple[int, int], int] = {}

    def forward(self, batch: ForwardBatch, *, rows: str = "last") -> torch.Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.batches.append(batch)
        assert len(batch.token_ids) <= self.backend.config.max_batch_tokens
        out, token_ids, pool = [], iter(batch.token_ids), self.backend.pool
        for slot, num_tokens in zip(batch.slots, batch.query_lengths, strict=True):
            start = pool.length(slot)
            assert pool.holds(slot, start + num_tokens)
            for position in range(start, start + num_tokens):
                self._tokens[slot, position] = next(token_ids)
            ends = range(start, start + num_tokens) if rows == "all" else [start + num_tokens - 1]
            for end in ends:
                out.append(self._logits([self._tokens[slot, p] for p in range(end + 1)]))
        return torch.stack(out)


def greedy(prompt: Sequence[int], num_tokens: int, logits: Logits = hashed_logits) -> list[int]:
    """What greedy decoding must give, token by token, without an engine."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(int(logits(history).argmax()))
    return history[len(prompt) :]
