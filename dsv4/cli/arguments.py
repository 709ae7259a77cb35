"""Arguments that several commands share, and the parser that reports misuse as an error of this library."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from dsv4 import registry
from dsv4.cli.units import parse_bytes, parse_count
from dsv4.config import ModelConfig
from dsv4.errors import ConfigError, Dsv4Error

Commands = Any
"""What `add_subparsers` returns; argparse gives it no public name."""

PRESETS = ("flash", "pro", "tiny")
SMALL_HIDDEN_SIZE = 1024
"""Up to this width one thread computes the operations of a layer about as fast as several do."""


class UsageError(Dsv4Error):
    """The command line is malformed."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing its usage and leaving."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # No abbreviations: they break when an option is added.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> Parser:
    """A command's own parser; the summary is its line in the list of commands and its description."""
    parser: Parser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    parser.set_defaults(run=run)
    return parser


def count(text: str) -> int:
    """Argument type: tokens or requests, at least 1; `4K` is 4096."""
    return _argument(parse_count, text)


def nbytes(text: str) -> int:
    """Argument type: bytes with a unit."""
    return _argument(parse_bytes, text)


def _argument(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_json(parser: Parser, note: str = "") -> None:
    parser.add_argument(
        "--json", action="store_true", help=f"print one JSON object and nothing else{note}"
    )


def add_row_format(parser: Parser) -> None:
    parser.add_argument(
        "--row-format",
        default="auto",
        metavar="{auto,fp32,bf16,fp8}",
        help="storage of window rows and entries; auto = fp32 for float32 models, else bf16",
    )


def add_pool(parser: Parser, *, default: str | None = "unified") -> None:
    names = ", ".join(registry.pool_names())
    chosen = default or "each of them"
    parser.add_argument(
        "--pool", default=default, metavar="NAME", help=f"pool family: {names} (default: {chosen})"
    )


def add_compute(parser: Parser, *, dtype: str) -> None:
    """How forwards are computed."""
    kernels = ", ".join(("auto", *registry.kernel_set_names()))
    parser.add_argument(
        "--kernels", default="auto", metavar="NAME", help=f"kernel set: {kernels} (default: auto)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--dtype",
        default=dtype,
        metavar="{auto,float32,bfloat16}",
        help=f"of activations and large weights (default: {dtype})",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="logits do not depend, to the last bit, on batching, chunking or pool",
    )


def add_threads(parser: Parser) -> None:
    parser.add_argument(
        "--threads",
        type=_threads,
        default=None,
        metavar="{auto,N}",
        help="threads that share an operation on the CPU; they wait for each other busily, so on a machine with "
        "other work a small model is many times slower with several than with one (default: auto = 1 on the CPU "
        f"up to hidden_size {SMALL_HIDDEN_SIZE}, else as torch chooses)",
    )


def _threads(text: str) -> int | None:
    if text == "auto":
        return None
    cores = os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= cores:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of threads from 1 to {cores}, the cores of this machine; give one, or auto"
        )
    return int(text)


def set_threads(args: argparse.Namespace, hidden_size: int) -> None:
    """Apply `--threads` to this process; `auto` needs the model's width."""
    on_cpu = args.device.partition(":")[0] == "cpu"
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    elif on_cpu and hidden_size <= SMALL_HIDDEN_SIZE:
        torch.set_num_threads(1)


def model_config(name: str) -> ModelConfig:
    """`flash`, `pro`, `tiny`, a config.json, or a checkpoint folder. Raises ConfigError."""
    if name in PRESETS:
        return ModelConfig.preset(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model {name!r}: no preset and no file; give {', '.join(PRESETS)}, a config.json or a "
            "checkpoint folder"
        )
    return ModelConfig.from_json(path)


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A text table: the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
