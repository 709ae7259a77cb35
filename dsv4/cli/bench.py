"""dsv4 bench: speed of whole steps or of single operations."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dsv4 import registry
from dsv4.backend import Backend, torch_device
from dsv4.bench import plot
from dsv4.bench.operation import OPS
from dsv4.bench.record import record
from dsv4.bench.shapes import MODELS
from dsv4.bench.step import StepBench
from dsv4.cli import bench_op
from dsv4.cli.arguments import (
    Commands,
    Parser,
    UsageError,
    add_command,
    add_compute,
    add_pool,
    add_row_format,
    add_threads,
    aligned,
    print_json,
    set_threads,
)
from dsv4.cli.units import format_count, parse_count
from dsv4.config import BackendConfig, ModelConfig
from dsv4.engine.engine import Engine
from dsv4.errors import ConfigError
from dsv4.model.checkpoint import load_weights
from dsv4.model.decoder import Decoder
from dsv4.model.model import Model, dtype_of, load, resolve
from dsv4.verify.golden import CONFIG, WEIGHTS


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "bench",
        run,
        "measure speed: step is prefill and decoding as a whole, the others are single operations",
    )
    parser.add_argument("bench", choices=(*OPS, "step"), help="what to measure")
    _add_step(parser)
    _add_ops(parser)
    add_pool(parser)
    add_row_format(parser)
    add_compute(parser, dtype="auto")
    add_threads(parser)
    add = parser.add_argument
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write one JSON object to FILE; without FILE, or with -, print it and nothing else",
    )
    add("--out", type=Path, metavar="FILE.json", help="write the record there too")
    add("--plot", type=Path, metavar="FILE.png", help="draw the rows (needs the extra bench)")


def _add_step(parser: Parser) -> None:
    add, defaults = parser.add_argument, StepBench()
    add("--checkpoint", default="tiny", metavar="CKPT", help="step: folder or tiny (default: tiny)")
    add("--golden", type=Path, metavar="DIR", help="step: weights of a golden folder instead")
    add(
        "--lengths",
        type=_counts,
        default=defaults.lengths,
        metavar="1K,4K,32K",
        help="step: prompt lengths (default: 1K,4K,32K)",
    )
    add(
        "--batches",
        type=_counts,
        metavar="1,8",
        help="requests that decode together (default: step 1,8; attend, store, compress 1 to 512 on a GPU)",
    )
    _add_number(parser, "--steps", defaults.steps, "step: decode steps of a measurement")
    _add_number(
        parser, "--repeats", defaults.repeats, "step: measurements, of which the median counts"
    )


def _add_ops(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--models",
        type=_models,
        default=MODELS,
        metavar="flash,pro",
        help="operations: whose dims are measured (default: both; small ones of their make on a CPU)",
    )
    add(
        "--index-format",
        default="fp8",
        metavar="{fp32,bf16,fp8,fp4}",
        help="score and compress: storage of indexer keys (default: fp8)",
    )
    add("--only", default="", metavar="TEXT", help="operations: cases whose name contains it")


def _add_number(parser: Parser, name: str, default: int, text: str) -> None:
    parser.add_argument(
        name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_count(part) for part in text.split(","))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _models(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no model; give {', '.join(MODELS)}")
    return names


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    written = [("--out", args.out), ("--plot", args.plot)]
    if args.json not in (None, "-"):
        written.append(("--json", Path(args.json)))
    for option, path in written:
        if path is not None:
            _check_writable(option, path)
    document = bench_op.measured(args) if args.bench in OPS else _measured_steps(args)
    if args.json == "-":
        print_json(document)
    elif args.bench in OPS:
        bench_op.show(document)
    else:
        _print(document, document["rows"], args.steps)
    for path in (args.out, Path(args.json) if args.json not in (None, "-") else None):
        if path is not None:
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    # A wrong result has no time.
    return int(any(row.get("time_us", 0.0) is None for row in document["rows"]))


def _measured_steps(args: argparse.Namespace) -> dict[str, Any]:
    draw = _plotter(args.plot) if args.plot else None
    batches = args.batches or StepBench().batches
    bench = StepBench(lengths=args.lengths, batches=batches, steps=args.steps, repeats=args.repeats)
    folder = args.golden or resolve(args.checkpoint)
    set_threads(args, ModelConfig.from_json(folder / CONFIG).hidden_size)
    engine = Engine(_model(args, bench))
    num_rows = len(bench.lengths) * (1 + len(bench.batches))
    # disable=None: no bar unless standard error is a terminal.
    rows = list(tqdm(bench.run(engine), total=num_rows, desc="bench", disable=None, leave=False))
    if draw is not None:
        draw(rows)
    return record(rows, args.command_line, args.device) | {"pool": args.pool}


def _check_writable(option: str, path: Path) -> None:
    """Before anything is measured, so that nothing is measured in vain."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: no folder {path.parent}; create it or name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: may not be written; name another file")


def _model(args: argparse.Namespace, bench: StepBench) -> Model:
    backend = BackendConfig(
        pool=registry.pool_config_class(args.pool)(
            max_requests=max(bench.batches),
            max_context=bench.max_context,
            row_format=args.row_format,
        ),
        kernels=args.kernels,
        deterministic=args.deterministic,
    )
    if args.golden is None:
        return load(args.checkpoint, backend=backend, device=args.device, dtype=args.dtype)
    config, device = ModelConfig.from_json(args.golden / CONFIG), torch_device(args.device)
    config = config.without_drafts()
    decoder = Decoder(config, dtype_of(args.dtype, config, device))
    load_weights(decoder, args.golden / WEIGHTS)
    return Model(
        config=config,
        decoder=decoder.to(device),
        backend=Backend.from_config(config, backend, device),
    )


def _print(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], steps: int) -> None:
    bench_op.print_head(document)
    table = [("", "batch", "prompt", "tok/s", "ms", "ms/step")]
    for row in rows:
        ms, is_decode = row["seconds"] * 1e3, row["what"] == "decode"
        table.append(
            (
                row["what"],
                str(row["batch"]),
                format_count(row["prompt_tokens"]),
                f"{row['tokens_per_second']:,.1f}",
                "" if is_decode else f"{ms:,.1f}",
                f"{ms / steps:,.2f}" if is_decode else "",
            )
        )
    print(aligned(table))


def _plotter(path: Path) -> Callable[[Sequence[Mapping[str, Any]]], None]:
    """Looked for before anything is measured, too."""
    figure = plot.figure_for(path)

    def draw(rows: Sequence[Mapping[str, Any]]) -> None:
        axes = figure.subplots()
        for what, batch in dict.fromkeys((row["what"], row["batch"]) for row in rows):
            line = [row for row in rows if (row["what"], row["batch"]) == (what, batch)]
            x = [row["prompt_tokens"] for row in line]
            axes.loglog(
                x, [row["tokens_per_second"] for row in line], "o-", label=f"{what}, batch {batch}"
            )
        axes.set(xlabel="prompt tokens", ylabel="tokens per second")
        axes.legend()
        figure.savefig(path)

    return draw
