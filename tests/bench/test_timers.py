"""Timers: the wall clock anywhere, the graph timer where there is a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from dsv4.bench.gpu_timer import GraphTimer
from dsv4.bench.timing import WallClock
from dsv4.errors import KernelError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def test_the_wall_clock_takes_the_median_per_call() -> None:
    seconds = iter([0.02, 0.02, 0.0, 0.0, 0.01, 0.01])
    time_us = WallClock().microseconds([lambda: time.sleep(next(seconds))] * 2)
    assert 10_000 <= time_us < 19_000


def test_the_empty_kernel_can_be_launched() -> None:
    pytest.importorskip("triton")
    from dsv4.bench.empty_triton import empty

    empty()


@needs_gpu
def test_every_replay_runs_every_call_once() -> None:
    counts = torch.zeros(3, device="cuda")
    timer = GraphTimer(counts.device)
    calls = [lambda i=i: counts[i].add_(1) for i in range(3)]  # type: ignore[misc]
    samples = timer.samples(calls)
    assert all(sample > 0 for sample in samples)
    # once to warm up, then the replays; capturing runs nothing
    assert counts.tolist() == [1 + len(samples)] * 3


@needs_gpu
def test_a_call_that_asks_the_device_cannot_be_measured() -> None:
    tensor = torch.ones(1, device="cuda")
    with pytest.raises(KernelError, match="cannot be captured"):
        GraphTimer(tensor.device).samples([lambda: tensor.item()])
