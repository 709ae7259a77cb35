"""dsv4 info: versions, devices, and which pools and kernel sets are registered and usable."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

import dsv4
from dsv4 import registry
from dsv4.backend import reasons
from dsv4.cli.arguments import Commands, add_command, add_json, print_json
from dsv4.config import ModelConfig, PoolConfig, UnifiedPoolConfig
from dsv4.errors import Dsv4Error
from dsv4.kernels.base import KernelSet

PACKAGES = ("torch", "triton", "safetensors", "attrs", "structlog", "transformers", "tokenizers")


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands, "info", run, "versions, devices, registered pools and kernel sets, and why not"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what is installed here."""
    devices = _devices()
    document: dict[str, Any] = {
        "versions": _versions(),
        "devices": devices,
        "pools": {name: _pool(name) for name in registry.pool_names()},
        "kernels": {
            name: {device: _kernels(name, torch.device(device)) for device in devices}
            for name in registry.kernel_set_names()
        },
        "auto": {device: _auto(torch.device(device)) for device in devices},
    }
    if args.json:
        print_json(document)
    else:
        _print(document)
    return 0


def _versions() -> dict[str, str | None]:
    return {"dsv4": dsv4.__version__, "python": platform.python_version()} | {
        name: _version(name) for name in PACKAGES
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    """Device name -> what it is."""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    cards = range(torch.cuda.device_count())
    return {"cpu": cpu} | {f"cuda:{i}": torch.cuda.get_device_name(i) for i in cards}


def _pool(name: str) -> dict[str, str | None]:
    try:
        config = registry.pool_config_class(name)
        return {
            "config": config.__name__,
            "class": registry.pool_class(config).__name__,
            "why_not": None,
        }
    except Dsv4Error as error:
        return {"config": None, "class": None, "why_not": str(error)}


def _kernels(name: str, device: torch.device) -> dict[str, Any]:
    """Whether a set runs on a device, on the released model, and which class serves each op."""
    model, pool = _released()
    try:
        family = registry.kernel_family(name)
        reason = family.why_not(device, model, pool)
        reasons = {op: family.why_not_op(op, device, model, pool) for op in KernelSet.OPS}
        kernels = family.build(deterministic=False) if reason is None else None
    except Dsv4Error as error:
        reason, kernels = str(error), None
        reasons = dict.fromkeys(KernelSet.OPS, reason)
    ops = {op: _op(kernels, op, reasons[op]) for op in KernelSet.OPS}
    return {"usable": reason is None, "why_not": reason, "ops": ops}


def _released() -> tuple[ModelConfig, PoolConfig]:
    model = ModelConfig.preset("flash")
    return model, UnifiedPoolConfig(max_requests=1, max_context=1).resolved(model)


def _op(kernels: KernelSet | None, op: str, reason: str | None) -> dict[str, str | None]:
    if kernels is None:
        return {"class": None, "why_not": reason}
    kernel = getattr(kernels, op)
    # fill is a class: each metadata builder makes its own
    served_by = kernel if isinstance(kernel, type) else type(kernel)
    return {"class": served_by.__name__, "why_not": reason}


def _auto(device: torch.device) -> dict[str, Any]:
    """What `kernels="auto"` runs for each op, and why not the sets that it would rather take."""
    model, pool = _released()
    chosen: dict[str, Any] = {}
    for op in KernelSet.OPS:
        asked = reasons(op, model, pool, device)
        runs = next(name for name, why in asked.items() if why is None)
        earlier = list(asked)[: list(asked).index(runs)]
        chosen[op] = {"runs": runs, "why_not": {name: asked[name] for name in earlier}}
    return chosen


def _print(document: Mapping[str, Any]) -> None:
    for name, version in document["versions"].items():
        print(f"{name:13} {version or 'not installed'}")
    for device, text in document["devices"].items():
        print(f"{device:13} {text}")
    print("\npools")
    for name, pool in document["pools"].items():
        print(f"  {name:11} {pool['why_not'] or '{config} -> {class}'.format(**pool)}")
    print("\nkernel sets")
    for name, devices in document["kernels"].items():
        for device, kernels in devices.items():
            print(f"  {name:11} {device:7} {kernels['why_not'] or 'usable'}")
            for op, served in kernels["ops"].items():
                if served["class"]:
                    print(f"      {op:9} {served['class']}")
    print("\nkernels auto")
    for device, chosen in document["auto"].items():
        alike: dict[tuple[str, str], list[str]] = {}
        for op, served in chosen.items():
            others = "; ".join(f"not {name}: {why}" for name, why in served["why_not"].items())
            alike.setdefault((served["runs"], others), []).append(op)
        for (runs, others), ops in alike.items():
            print(f"  {device:7} {runs:7} {' '.join(ops)}")
            if others:
                print(f"          {others}")
