"""A benchmark's record: the rows, and the machine, versions, command and date that they belong to."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

import dsv4

Row = Mapping[str, object]


def record(rows: Sequence[Row], command: Sequence[str], device: str = "cpu") -> dict[str, object]:
    """The JSON object that benchmarks write."""
    return {
        "machine": machine(device),
        "versions": versions(),
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "rows": list(rows),
    }


def machine(device: str) -> dict[str, object]:
    """What the numbers were measured on."""
    found: dict[str, object] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return found


def versions() -> dict[str, str]:
    """Of this library and what it runs on."""
    found = {"dsv4": dsv4.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
