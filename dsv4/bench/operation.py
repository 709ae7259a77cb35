"""Runs the benchmark of one op: correctness first, then time against what the device can do and what peers take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dsv4.backend import build_kernels
from dsv4.bench import attend, compress, experts, fill, prefill, score, select, store
from dsv4.bench.case import Case, Setup
from dsv4.bench.ceilings import Ceilings
from dsv4.bench.gpu_timer import GraphTimer
from dsv4.bench.peers import GPU_NAME, peers_of
from dsv4.bench.shapes import bench_model, default_batches
from dsv4.bench.timing import Timer, WallClock
from dsv4.config import BackendConfig, UnifiedPoolConfig

Row = dict[str, Any]

OPS: Mapping[str, Callable[[Setup], Iterator[Case]]] = {
    "attend": attend.cases,
    "prefill": prefill.cases,
    "fill": fill.cases,
    "store": store.cases,
    "compress": compress.cases,
    "score": score.cases,
    "select": select.cases,
    "experts": experts.cases,
}


def timer_for(device: torch.device) -> Timer:
    return GraphTimer(device) if device.type == "cuda" else WallClock()


def setup_for(
    device: torch.device,
    timer: Timer,
    *,
    models: tuple[str, ...],
    kernels: str,
    batches: tuple[int, ...] | None,
    row_format: str,
    index_format: str,
    deterministic: bool,
) -> Setup:
    """Published shapes on a GPU, small ones elsewhere. Raises ConfigError or KernelError."""
    small = device.type != "cuda"
    configs = {name: bench_model(name, small=small) for name in models}
    model = next(iter(configs.values()))
    pool = UnifiedPoolConfig(
        max_requests=1, max_context=256, row_format=row_format, index_format=index_format
    )
    config = BackendConfig(pool=pool, kernels=kernels, deterministic=deterministic).resolved(model)
    return Setup(
        device=device,
        kernels=build_kernels(model, config, device),
        models=configs,
        small=small,
        max_calls=timer.max_calls,
        batches=batches or default_batches(small=small),
        row_format=config.pool.row_format,
        index_format=config.pool.index_format,
    )


def measure(
    op: str, setup: Setup, timer: Timer, ceilings: Ceilings, *, only: str = ""
) -> Iterator[Row]:
    """One row per case whose name and size contain `only`. A wrong result has no time: `time_us` is None."""
    for case in OPS[op](setup):
        if only not in f"{case.name} {case.size}":
            continue
        error = case.check()
        row: Row = {
            "op": op,
            "case": case.name,
            "size": case.size,
            "error": error,
            "tolerance": case.tolerance,
            "nbytes": case.nbytes,
            "flop": case.flop,
            "calls": len(case.calls),
            "time_us": None,
        }
        if error <= case.tolerance:
            row |= _speed(op, case, timer.microseconds(case.calls), setup, ceilings)
        yield row


def _speed(op: str, case: Case, time_us: float, setup: Setup, ceilings: Ceilings) -> Row:
    limit_us = ceilings.limit_us(case.nbytes, case.flop, fp8=case.fp8)
    # Recorded for the published shapes on one GPU model.
    peers = {} if setup.small else dict(peers_of(op, case.name, case.size))
    speed: Row = {
        "time_us": round(time_us, 3),
        "gb_per_s": round(case.nbytes / time_us / 1e3, 1),
        "tflops": round(case.flop / time_us / 1e6, 2),
        "limit_us": round(limit_us, 3),
        "bound": "bytes" if limit_us == ceilings.copy_us(case.nbytes) else "flop",
        "fraction_of_limit": round(limit_us / time_us, 4),
        "peers_us": peers,
    }
    if peers and GPU_NAME in torch.cuda.get_device_name(setup.device):
        speed["ratio_to_peers"] = {name: round(time_us / us, 3) for name, us in peers.items()}
    return speed
