"""BackendConfig and EngineConfig: how forwards are batched and run."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import field, frozen

from dsv4.config.checks import boolean, instance, integer, names
from dsv4.config.files import NESTED, FileConfig
from dsv4.config.model import ModelConfig
from dsv4.config.pool import PoolConfig
from dsv4.errors import ConfigError


@frozen(kw_only=True)
class BackendConfig(FileConfig):
    """A pool, the kernels that run on it, and the capacity of one forward."""

    pool: PoolConfig = field(validator=instance(PoolConfig), metadata={NESTED: PoolConfig})
    kernels: str = field(default="auto", validator=instance(str))
    """Kernel-set name; auto = DSV4_KERNELS, else the best set that can run."""
    overrides: Mapping[str, str] = field(factory=dict, validator=names(), hash=False)
    """Op name -> kernel-set name, for single ops."""
    max_batch_tokens: int = field(default=2048, validator=integer(least=1))
    """Tokens of one forward, padding included."""
    max_batch_requests: int | None = field(default=None, validator=integer(least=1, optional=True))
    """Requests of one forward; None = pool.max_requests."""
    score_budget_bytes: int = field(default=64 * 2**20, validator=integer(least=1))
    """Bytes of indexer scores held at once; larger score matrices are tiled."""
    deterministic: bool = field(default=False, validator=boolean())
    """A token's logits do not depend, to the last bit, on how it is batched, chunked or stored."""

    def __attrs_post_init__(self) -> None:
        requests = self.max_batch_requests
        if requests is not None and requests > self.pool.max_requests:
            raise ConfigError(
                f"max_batch_requests {requests}: the pool has max_requests {self.pool.max_requests} "
                "slots; lower it or raise pool.max_requests"
            )

    def resolved(self, model: ModelConfig) -> BackendConfig:
        """The same config with every default filled in for `model`, except `kernels`, which depends on
        the device."""
        return attrs.evolve(
            self,
            pool=self.pool.resolved(model),
            max_batch_requests=self.max_batch_requests or self.pool.max_requests,
        )


@frozen(kw_only=True)
class EngineConfig(FileConfig):
    """Continuous batching over a backend."""

    backend: BackendConfig = field(
        validator=instance(BackendConfig), metadata={NESTED: BackendConfig}
    )
    chunk_tokens: int | None = field(default=None, validator=integer(least=1, optional=True))
    """Prompt tokens of one request in one forward; None = backend.max_batch_tokens."""
    max_queue: int = field(default=1024, validator=integer(least=0))
    """Requests that may wait for a slot; one more is refused."""

    def __attrs_post_init__(self) -> None:
        limit = self.backend.max_batch_tokens
        if self.chunk_tokens is not None and self.chunk_tokens > limit:
            raise ConfigError(
                f"chunk_tokens {self.chunk_tokens}: one forward holds max_batch_tokens {limit}; "
                "lower it or raise backend.max_batch_tokens"
            )

    def resolved(self, model: ModelConfig) -> EngineConfig:
        """The same config with every default filled in for `model`."""
        return attrs.evolve(
            self,
            backend=self.backend.resolved(model),
            chunk_tokens=self.chunk_tokens or self.backend.max_batch_tokens,
        )
