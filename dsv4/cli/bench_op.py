"""dsv4 bench of single operations: what is measured, and how it reads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from dsv4.backend import torch_device
from dsv4.bench import plot
from dsv4.bench.ceilings import measure_ceilings
from dsv4.bench.operation import measure, setup_for, timer_for
from dsv4.bench.peers import SOURCE
from dsv4.bench.record import record
from dsv4.cli.arguments import aligned

UNITS = {
    "copy_gbs": "copy {:,.0f} GB/s",
    "read_gbs": "read {:,.0f} GB/s",
    "matmul_tflops": "matmul {:,.1f} TFLOP/s",
    "fp8_matmul_tflops": "fp8 matmul {:,.0f} TFLOP/s",
    "empty_us": "empty kernel {:.2f} us",
}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The record of one operation's benchmark; draws the picture if one was asked for."""
    draw = plot.plotter(args.plot) if args.plot else None
    device = torch_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads or 1)
    else:
        torch.cuda.set_device(device.index or 0)
    torch.manual_seed(0)
    timer = timer_for(device)
    setup = setup_for(
        device,
        timer,
        models=args.models,
        kernels=args.kernels,
        batches=args.batches,
        row_format=args.row_format,
        index_format=args.index_format,
        deterministic=args.deterministic,
    )
    ceilings = measure_ceilings(device, timer)
    cases = measure(args.bench, setup, timer, ceilings, only=args.only)
    rows = list(tqdm(cases, desc=f"bench {args.bench}", disable=None, leave=False))
    if draw is not None and any(row["time_us"] for row in rows):
        draw([row for row in rows if row["time_us"]], ceilings)
    return record(rows, args.command_line, args.device) | {
        "kernels": setup.kernels.name,
        "row_format": setup.row_format,
        "index_format": setup.index_format,
        "method": timer.method,
        "ceilings": ceilings.document(),
        "peers": SOURCE,
    }


def print_head(document: Mapping[str, Any]) -> None:
    """Machine, versions and date in one line."""
    for part in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in document[part].items()), end="; ")
    print(document["date"])


def show(document: Mapping[str, Any]) -> None:
    """The record as text."""
    print_head(document)
    print(
        f"kernels {document['kernels']}, rows {document['row_format']}, index keys {document['index_format']}; "
        f"{document['method']}"
    )
    known = {name: value for name, value in document["ceilings"].items() if value is not None}
    print("ceilings: " + ", ".join(UNITS[name].format(value) for name, value in known.items()))
    head = (
        "",
        "",
        "us",
        "GB/s",
        "TFLOP/s",
        "limit us",
        "of limit",
        "error",
        "peers us (ours/theirs)",
    )
    print(aligned([head, *map(_cells, document["rows"])], left=2))
    if any(row.get("peers_us") for row in document["rows"]):
        print(f"peers {document['peers']}")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["time_us"] is None:
        wrong = f"{row['error']:.1e} (at most {row['tolerance']:.1e})"
        return (row["case"], row["size"], "wrong", "", "", "", "", wrong, "")
    ratios = row.get("ratio_to_peers", {})
    peers = [
        f"{name} {us:g}" + (f" ({ratios[name]:.2f})" if name in ratios else "")
        for name, us in row["peers_us"].items()
    ]
    return (
        row["case"],
        row["size"],
        f"{row['time_us']:,.1f}",
        f"{row['gb_per_s']:,.0f}",
        f"{row['tflops']:,.1f}" if row["flop"] else "",
        f"{row['limit_us']:,.1f}",
        f"{row['fraction_of_limit']:.0%}",
        f"{row['error']:.1e}",
        ", ".join(peers),
    )
