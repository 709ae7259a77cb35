"""What the pool and builder suites share: the fixture that a third party gives, and pools made from it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import pytest
import torch

from dsv4.config import ModelConfig, PoolConfig
from dsv4.errors import Dsv4Error
from dsv4.pool.base import KVPool
from dsv4.testing.memory import Guarded, differing, pool_bytes
from dsv4.testing.models import pool_config, small_model
from dsv4.testing.player import Player, build_pool


class MakePlayer(Protocol):
    """Builds a pool in poisoned memory and the player of its sequences."""

    def __call__(
        self, model: ModelConfig | None = None, *, seed: int = 0, **options: int | str | None
    ) -> Player: ...


def some_ids(num: int, *, seed: int = 0) -> list[int]:
    """Token ids of the small models' vocabulary, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(97) for _ in range(num)]


@contextmanager
def refused(pool: KVPool, *kinds: type[Dsv4Error], slots: Sequence[int] = ()) -> Iterator[None]:
    """The block raises one of the errors, and afterwards memory and books are as before."""
    memory, books = pool_bytes(pool), _books(pool, slots)
    with pytest.raises(kinds or Dsv4Error) as caught:
        yield
    assert str(caught.value), "an error names the value, the limit and the remedy"
    assert not differing(memory, pool_bytes(pool)), "a failing call wrote into the pool"
    assert books == _books(pool, slots), "a failing call changed the books"


def _books(pool: KVPool, slots: Sequence[int]) -> tuple[object, ...]:
    lengths = [pool.length(slot) for slot in slots]
    return pool.num_free_slots, pool.num_free_pages, pool.version, lengths


class PoolSetup:
    """Base of the suites that a pool config class is given to."""

    @pytest.fixture
    def pool_config_type(self) -> type[PoolConfig]:
        """The one fixture to give: the config class whose type chooses the pool."""
        raise NotImplementedError(
            f"{type(self).__name__}: give a fixture pool_config_type that returns the PoolConfig subclass"
        )

    @pytest.fixture
    def device(self) -> torch.device:
        """Where the pools live; give another one to test them there."""
        return torch.device("cpu")

    @pytest.fixture
    def make(
        self, pool_config_type: type[PoolConfig], device: torch.device
    ) -> Iterator[MakePlayer]:
        """Makes players; in the end no byte around their tables may have changed."""
        memories: list[dict[str, Guarded]] = []

        def make_player(
            model: ModelConfig | None = None, *, seed: int = 0, **options: int | str | None
        ) -> Player:
            model = model or small_model()
            memories.append({})
            config = pool_config(pool_config_type, model, **options)
            return Player(build_pool(config, model, device, memories[-1]), seed=seed)

        yield make_player
        for memory in memories:
            spoiled = [name for name, block in memory.items() if not block.intact()]
            assert not spoiled, f"bytes around {', '.join(spoiled)} were written"
