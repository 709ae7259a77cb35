"""dsv4 plan: what a pool costs and what fits a memory budget, before anything is allocated."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

import attrs

from dsv4 import registry
from dsv4.backend import Backend
from dsv4.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_pool,
    add_row_format,
    aligned,
    count,
    model_config,
    nbytes,
    print_json,
)
from dsv4.cli.units import format_bytes, format_count
from dsv4.config import BackendConfig, ModelConfig, PoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.plan import Fit, fits, largest_context, most_requests

_LAYER = re.compile(r"^layer\d+\.")


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands, "plan", run, "bytes per token and per slot, and what fits a memory budget"
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="{flash,pro,tiny,CONFIG.json}",
        help="a preset, a config.json or a checkpoint folder",
    )
    add(
        "--memory",
        type=nbytes,
        required=True,
        metavar="80GiB",
        help="budget of pool, metadata and workspaces; weights are not counted",
    )
    add_pool(parser)
    add_row_format(parser)
    add("--max-requests", type=count, metavar="N", help="only the row of so many slots")
    add("--max-context", type=count, metavar="N", help="how many slots can reach this, e.g. 1M")
    add("--without-drafts", action="store_true", help="leave the model's draft layers out")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; a budget that holds not even one token of one request is an error."""
    model = model_config(args.model)
    if args.without_drafts:
        model = model.without_drafts()
    pool_type = registry.pool_config_class(args.pool)
    found = _fits(args, pool_type, model)
    if not found:
        raise ConfigError(
            f"memory {format_bytes(args.memory)}: holds no request of this size; raise --memory or "
            "lower --max-requests or --max-context"
        )
    shown = found[0] if len(found) == 1 else min(found, key=lambda fit: abs(fit.max_requests - 8))
    config = _pool_config(args, pool_type, shown).resolved(model)
    parts = Backend.estimate(model, BackendConfig(pool=config)).components
    report = registry.pool_class(config).estimate(config, model)
    document = {
        "model": args.model,
        "pool": args.pool,
        "row_format": config.row_format,
        "index_format": config.index_format,
        "memory_bytes": args.memory,
        "bytes_per_token": report.bytes_per_token,
        "bytes_per_slot": report.bytes_per_slot,
        "fits": [attrs.asdict(fit) for fit in found],
        "components": {"of": attrs.asdict(shown), "nbytes": _grouped(parts)},
    }
    if args.json:
        print_json(document)
    else:
        _print(args, document, found, shown, _grouped(parts))
    return 0


def _pool_config(args: argparse.Namespace, pool_type: type[PoolConfig], fit: Fit) -> PoolConfig:
    return pool_type(
        max_requests=fit.max_requests, max_context=fit.max_context, row_format=args.row_format
    )


def _fits(
    args: argparse.Namespace, pool_type: type[PoolConfig], model: ModelConfig
) -> tuple[Fit, ...]:
    """Requests x context that fit: all powers of two of requests, or what the options ask for."""
    config = pool_type(
        max_requests=args.max_requests or 1,
        max_context=args.max_context or 1,
        row_format=args.row_format,
    )
    pool_class = registry.pool_class(config)

    def beside_the_pool(sized: PoolConfig) -> int:
        pool = pool_class.estimate(sized.resolved(model), model).total
        return Backend.estimate(model, BackendConfig(pool=sized)).total - pool

    if args.max_context is None and args.max_requests is None:
        return fits(
            pool_class, config, model, budget_nbytes=args.memory, extra_nbytes=beside_the_pool
        )
    if args.max_context is None:
        fit = largest_context(
            pool_class, config, model, budget_nbytes=args.memory, extra_nbytes=beside_the_pool
        )
    else:
        fit = most_requests(
            pool_class, config, model, budget_nbytes=args.memory, extra_nbytes=beside_the_pool
        )
    if fit is None or (args.max_requests or 0) > fit.max_requests:
        return ()
    return (fit,)


def _grouped(components: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind of table: layers together, metadata together, workspaces together."""
    groups: dict[str, int] = {}
    for name, size in components.items():
        kind = _LAYER.sub("", name)
        if kind == name and "." in name:
            kind = name.partition(".")[0]
        groups[kind] = groups.get(kind, 0) + size
    return groups


def _print(
    args: argparse.Namespace,
    document: Mapping[str, object],
    found: tuple[Fit, ...],
    shown: Fit,
    groups: Mapping[str, int],
) -> None:
    print(
        f"{args.model}: {args.pool} pool, {document['row_format']} rows, "
        f"{document['index_format']} index keys"
    )
    print(f"per token  {document['bytes_per_token']:,.1f} B")
    print(f"per slot   {document['bytes_per_slot']:,} B (rings, state, bookkeeping)\n")
    print(f"what fits {format_bytes(args.memory)} (pool, metadata, workspaces; without weights)")
    rows = [("requests", "context of each", "bytes")]
    rows += [(f"{f.max_requests:,}", format_count(f.max_context), f"{f.nbytes:,}") for f in found]
    print(aligned(rows, left=0) + "\n")
    print(f"bytes at {shown.max_requests} requests of {format_count(shown.max_context)} tokens")
    sizes = sorted(groups.items(), key=lambda item: -item[1])
    print(aligned([(name, f"{size:,}", format_bytes(size)) for name, size in sizes]))
