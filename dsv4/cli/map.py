"""dsv4 map: a picture of a pool, as SVG or as text."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv4 import registry
from dsv4.cli.arguments import (
    Commands,
    UsageError,
    add_command,
    add_pool,
    add_row_format,
    count,
    model_config,
)
from dsv4.cli.pool_map import pool_map
from dsv4.cli.pool_svg import render_svg
from dsv4.cli.pool_text import render_text
from dsv4.model.model import resolve


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands, "map", run, "picture of a pool: tables, regions, slots and pages"
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", metavar="CKPT", help="checkpoint folder, or the word tiny")
    add("--model", metavar="{flash,pro,tiny,CONFIG.json}", help="a config instead of a checkpoint")
    add_pool(parser)
    add_row_format(parser)
    add("--max-requests", type=count, default=4, metavar="N", help="slots (default: 4)")
    add("--max-context", type=count, default=1024, metavar="N", help="tokens (default: 1K)")
    add("--out", type=Path, metavar="FILE.svg", help="write the picture there; else print text")


def run(args: argparse.Namespace) -> int:
    """Draw the pool of a config; nothing is allocated."""
    if (args.checkpoint is None) == (args.model is None):
        raise UsageError("name one model: CKPT or --model")
    model = model_config(args.model or str(resolve(args.checkpoint)))
    config = registry.pool_config_class(args.pool)(
        max_requests=args.max_requests, max_context=args.max_context, row_format=args.row_format
    ).resolved(model)
    title = (
        f"{args.model or args.checkpoint}: {args.pool} pool, {config.row_format} rows, "
        f"{config.max_requests} slots of {config.max_context} tokens, pages of {config.page_tokens} tokens"
    )
    drawn = pool_map(title, config, model)
    if args.out is None:
        print(render_text(drawn))
        return 0
    if args.out.suffix != ".svg":
        raise UsageError(f"--out {args.out}: the picture is SVG; name a file that ends in .svg")
    args.out.write_text(render_svg(drawn), encoding="utf-8")
    num_tables = sum(table.num_tables for table in drawn.tables)
    print(f"wrote {args.out} ({num_tables} tables)")
    return 0
