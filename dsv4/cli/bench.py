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
from dsv4.bench.record import record
from dsv4.bench.step import StepBench
from dsv4.cli.arguments import (
    Commands,
    Parser,
    UsageError,
    add_command,
    add_compute,
    add_json,
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

KERNEL_BENCHES = ("attend", "prefill", "fill", "store", "compress", "score", "select")


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands, "bench", run, "measure speed; `step` is prefill and decoding as a whole"
    )
    defaults = StepBench()
    add = parser.add_argument
    add(
        "bench",
        choices=(*KERNEL_BENCHES, "step"),
        help=f"only step runs today; {', '.join(KERNEL_BENCHES)} come with the GPU kernels",
    )
    add("--checkpoint", default="tiny", metavar="CKPT", help="folder or tiny (default: tiny)")
    add("--golden", type=Path, metavar="DIR", help="weights of a golden folder instead")
    add(
        "--lengths",
        type=_counts,
        default=defaults.lengths,
        metavar="1K,4K,32K",
        help="prompt lengths (default: 1K,4K,32K)",
    )
    add(
        "--batches",
        type=_counts,
        default=defaults.batches,
        metavar="1,8",
        help="requests that decode together (default: 1,8)",
    )
    _add_number(parser, "--steps", defaults.steps, "decode steps of a measurement")
    _add_number(parser, "--repeats", defaults.repeats, "measurements, of which the median counts")
    add_pool(parser)
    add_row_format(parser)
    add_compute(parser, dtype="auto")
    add_threads(parser)
    add_json(parser)
    add("--out", type=Path, metavar="FILE.json", help="write the record there too")
    add("--plot", type=Path, metavar="FILE.png", help="draw the rows (needs the extra bench)")


def _add_number(parser: Parser, name: str, default: int, text: str) -> None:
    parser.add_argument(
        name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_count(part) for part in text.split(","))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    if args.bench in KERNEL_BENCHES:
        raise UsageError(f"bench {args.bench}: not available yet: it comes with the GPU kernels")
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path is not None:
            _check_writable(option, path)
    plot = _plotter(args.plot) if args.plot else None
    bench = StepBench(
        lengths=args.lengths, batches=args.batches, steps=args.steps, repeats=args.repeats
    )
    folder = args.golden or resolve(args.checkpoint)
    set_threads(args, ModelConfig.from_json(folder / CONFIG).hidden_size)
    engine = Engine(_model(args, bench))
    num_rows = len(bench.lengths) * (1 + len(bench.batches))
    # disable=None: no bar unless standard error is a terminal.
    rows = list(tqdm(bench.run(engine), total=num_rows, desc="bench", disable=None, leave=False))
    document = record(rows, args.command_line, args.device) | {"pool": args.pool}
    if args.json:
        print_json(document)
    else:
        _print(document, rows, bench.steps)
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plot(rows)
    return 0


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
    for part in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in document[part].items()), end="; ")
    print(document["date"])
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
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot: needs matplotlib; pip install 'dsv4[bench]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise UsageError(
            f"--plot {path}: no picture format; end it in {', '.join(sorted(formats))}"
        )

    def plot(rows: Sequence[Mapping[str, Any]]) -> None:
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

    return plot
