"""What a pool costs and what fits a budget, from configs alone: nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
from attrs import frozen

from dsv4.config import ModelConfig, PoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.base import KVPool, MemoryReport
from dsv4.pool.layout import PoolLayout

ExtraBytes = Callable[[PoolConfig], int]
"""Bytes beside the pool that grow with it (metadata, workspaces)."""


@frozen(kw_only=True)
class Fit:
    """A pool that fits the budget."""

    max_requests: int
    max_context: int
    nbytes: int
    """Pool and extra together."""


def report(layout: PoolLayout) -> MemoryReport:
    """Bytes of every table; a table's bytes are spread evenly over its rows for the per-token and per-slot sums."""
    per_slot = per_page = 0.0
    for table in layout.tables:
        row_nbytes = table.nbytes / max(1, table.num_rows)
        for share in table.shares:
            per_slot += share.rows_per_slot * row_nbytes
            per_page += share.rows_per_page * row_nbytes
    return MemoryReport(
        components={table.name: table.nbytes for table in layout.tables},
        bytes_per_token=per_page / layout.geometry.page_tokens,
        bytes_per_slot=math.ceil(per_slot),
    )


def no_extra(config: PoolConfig) -> int:
    """The pool alone."""
    return 0


def largest_context(
    pool_type: type[KVPool],
    config: PoolConfig,
    model: ModelConfig,
    *,
    budget_nbytes: int,
    extra_nbytes: ExtraBytes = no_extra,
) -> Fit | None:
    """The largest max_context for the config's max_requests, every slot able to reach it; None if not one token fits.

    At most the model's max_position_embeddings. `num_pages` of the config is ignored.
    """

    def fit(max_context: int) -> Fit:
        changed = attrs.evolve(config, max_context=max_context, num_pages=None)
        return _measure(pool_type, changed, model, extra_nbytes)

    return _largest(fit, model.max_position_embeddings, budget_nbytes)


def most_requests(
    pool_type: type[KVPool],
    config: PoolConfig,
    model: ModelConfig,
    *,
    budget_nbytes: int,
    extra_nbytes: ExtraBytes = no_extra,
) -> Fit | None:
    """The most slots that can all reach the config's max_context at once; None if not one fits.

    `num_pages` of the config is ignored.
    """

    def fit(max_requests: int) -> Fit:
        changed = attrs.evolve(config, max_requests=max_requests, num_pages=None)
        return _measure(pool_type, changed, model, extra_nbytes)

    # A slot costs at least one byte.
    return _largest(fit, max(1, budget_nbytes), budget_nbytes)


def fits(
    pool_type: type[KVPool],
    config: PoolConfig,
    model: ModelConfig,
    *,
    budget_nbytes: int,
    extra_nbytes: ExtraBytes = no_extra,
) -> tuple[Fit, ...]:
    """The largest context for 1, 2, 4, ... slots, as far as a token fits; `max_requests` of the config is ignored."""
    found: list[Fit] = []
    max_requests = 1
    while True:
        changed = attrs.evolve(config, max_requests=max_requests)
        try:
            fit = largest_context(
                pool_type, changed, model, budget_nbytes=budget_nbytes, extra_nbytes=extra_nbytes
            )
        except ConfigError:
            if max_requests == 1:
                raise
            fit = None  # so many slots are beyond what a pool can address
        if fit is None:
            return tuple(found)
        found.append(fit)
        max_requests *= 2


def _measure(
    pool_type: type[KVPool], config: PoolConfig, model: ModelConfig, extra_nbytes: ExtraBytes
) -> Fit:
    nbytes = pool_type.estimate(config, model).total + extra_nbytes(config)
    return Fit(max_requests=config.max_requests, max_context=config.max_context, nbytes=nbytes)


def _largest(fit: Callable[[int], Fit], limit: int, budget_nbytes: int) -> Fit | None:
    """The fit of the largest argument in [1, limit] that is within the budget; sizes grow with the argument."""
    best = fit(1)
    if best.nbytes > budget_nbytes:
        return None
    low, high = 1, 2
    while high <= limit and (candidate := _fit_within(fit, high, budget_nbytes)):
        best, low, high = candidate, high, 2 * high
    high = min(high, limit + 1)
    # `low` fits, `high` does not.
    while high - low > 1:
        middle = (low + high) // 2
        if candidate := _fit_within(fit, middle, budget_nbytes):
            best, low = candidate, middle
        else:
            high = middle
    return best


def _fit_within(fit: Callable[[int], Fit], argument: int, budget_nbytes: int) -> Fit | None:
    try:
        candidate = fit(argument)
    except ConfigError:
        # With argument 1 the config was fine, so this size is beyond what a pool can address.
        return None
    return candidate if candidate.nbytes <= budget_nbytes else None
