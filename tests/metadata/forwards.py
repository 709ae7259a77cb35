"""Hypothesis strategies: pools with slots at any lengths, and ragged batches on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from hypothesis import strategies as st

from dsv4.config import LayerKind, ModelConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import KVPool
from dsv4.testing.models import Layers, page_tokens_of, pool_config, small_model
from dsv4.testing.player import build_pool

SLIDING, CSA, HCA = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA
MAX_TOKENS = 96
SCHEDULES: tuple[Layers, ...] = (
    ((SLIDING, 0),),
    ((CSA, 4), (HCA, 128)),
    ((SLIDING, 0), (CSA, 3), (HCA, 5)),
    ((CSA, 4), (CSA, 6), (HCA, 6), (HCA, 1)),
    ((HCA, 7), (CSA, 1)),
)


@frozen(kw_only=True)
class Drawn:
    """A pool, its slots' lengths, and the sizes of a batch; negative slots are padding."""

    config: PoolConfig
    model: ModelConfig
    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    padding: int

    def pool(self) -> KVPool:
        """With every slot at its length; no row is written."""
        pool = build_pool(self.config, self.model, torch.device("cpu"))
        for length in self.lengths:
            slot = pool.acquire()
            pool.reserve(slot, min(length + MAX_TOKENS, self.config.max_context))
            set_length(pool, slot, length)
        return pool

    def batch(self) -> ForwardBatch:
        return batch_of(self.sizes, self.padding)


def set_length(pool: KVPool, slot: int, length: int) -> None:
    """Commit up to a length."""
    step = length - pool.length(slot)
    pool.begin_forward([slot], [step])
    pool.commit(slot, step)


def batch_of(
    sizes: tuple[tuple[int, int], ...] | Mapping[int, int], padding: int = 0
) -> ForwardBatch:
    pairs = list(sizes.items() if isinstance(sizes, Mapping) else sizes)
    num = sum(n for _, n in pairs)
    return ForwardBatch(
        slots=[slot for slot, _ in pairs],
        query_lengths=[n for _, n in pairs],
        token_ids=[(7 * i + 1) % 97 for i in range(num)],
        num_tokens=num + padding,
    )


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Mixtures of decode, verify, chunks, idle slots, padding requests and padding tokens."""
    margin = draw(st.sampled_from([1, 2, 3, 7, 12]))
    model = small_model(
        draw(st.sampled_from(SCHEDULES)),
        window=draw(st.sampled_from([1, 2, 7, 31, 128])),
        topk=draw(st.sampled_from([1, 3, 17, 500])),
        drafts=draw(st.integers(0, 1)),
    )
    config = pool_config(
        draw(st.sampled_from([UnifiedPoolConfig, ThreePoolConfig])),
        model,
        max_requests=5,
        max_context=400,
        in_place_tokens=margin,
        page_tokens=page_tokens_of(model, draw(st.sampled_from([1, 13, 200]))),
    )
    lengths = draw(st.lists(st.integers(0, 260), min_size=1, max_size=5))
    slots = draw(st.permutations(range(len(lengths))))[: draw(st.integers(0, len(lengths)))]
    sizes = [(slot, draw(st.sampled_from([0, 1, 1, 2, margin, margin + 1, 19]))) for slot in slots]
    for _ in range(draw(st.integers(0, 5 - len(sizes)))):
        sizes.insert(draw(st.integers(0, len(sizes))), (-1, draw(st.integers(0, 2))))
    return Drawn(
        config=config,
        model=model,
        lengths=tuple(lengths),
        sizes=tuple(sizes),
        padding=draw(st.sampled_from([0, 0, 1, 9])),
    )
