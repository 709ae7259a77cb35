"""What the device can do at most, measured in the run that the kernels are measured in."""

from __future__ import annotations

import importlib.util

import attrs
import torch
from attrs import frozen

from dsv4.bench.timing import Call, Timer

COPY_BYTES = 2 * 10**9
MATMUL_WIDTH = 8192
FP8_MATMUL_CALLS = MATMUL_CALLS = 4
SMALL_BYTES, SMALL_WIDTH = 2**24, 256
"""On a CPU, where the times judge nothing."""


@frozen(kw_only=True)
class Ceilings:
    copy_gbs: float
    """Read and written, 10^9 bytes a second."""
    read_gbs: float
    matmul_tflops: float
    """bf16, best repeat: what a short kernel meets before the power cap."""
    fp8_matmul_tflops: float | None
    """None where torch has no fp8 product for the device."""
    empty_us: float | None
    """An empty kernel; None on a CPU."""

    def limit_us(self, nbytes: float, flop: float, *, fp8: bool = False) -> float:
        """The longer of moving the bytes and doing the products."""
        tflops = (self.fp8_matmul_tflops if fp8 else None) or self.matmul_tflops
        return max(self.copy_us(nbytes), flop / tflops / 1e6)

    def copy_us(self, nbytes: float) -> float:
        return nbytes / self.copy_gbs / 1e3

    def document(self) -> dict[str, object]:
        return attrs.asdict(self)


def measure_ceilings(device: torch.device, timer: Timer) -> Ceilings:
    """Takes a second or two."""
    small = device.type == "cpu"
    numel = (SMALL_BYTES if small else COPY_BYTES) // 4
    source, target = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    total = torch.zeros((), device=device)
    copy_us = _eager_us(device, timer, lambda: target.copy_(source))
    read_us = _eager_us(device, timer, lambda: torch.sum(source, dim=0, out=total))
    return Ceilings(
        copy_gbs=8 * numel / copy_us / 1e3,
        read_gbs=4 * numel / read_us / 1e3,
        matmul_tflops=_matmul_tflops(device, timer, SMALL_WIDTH if small else MATMUL_WIDTH),
        fp8_matmul_tflops=None if small else _fp8_tflops(device, timer),
        empty_us=None if small else _empty_us(timer),
    )


def _eager_us(device: torch.device, timer: Timer, call: Call) -> float:
    """Best of several, outside a graph: a memory copy node of a graph is slower than the copy kernel."""
    if device.type == "cpu":
        return min(timer.samples([call]))
    times: list[float] = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) * 1e3)
    return min(times)


def _matmul_tflops(device: torch.device, timer: Timer, width: int) -> float:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(width, width, device=device, dtype=dtype)
    calls = [lambda: torch.mm(a, b, out=out)] * MATMUL_CALLS
    return float(2 * width**3 / min(timer.samples(calls)) / 1e6)


def _fp8_tflops(device: torch.device, timer: Timer) -> float | None:
    width, one = MATMUL_WIDTH, torch.ones((), device=device)
    try:
        a, b = (torch.randn(width, width, device=device).to(torch.float8_e4m3fn) for _ in range(2))

        def call() -> object:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        return 2 * width**3 / min(timer.samples([call] * FP8_MATMUL_CALLS)) / 1e6
    except (RuntimeError, AttributeError):
        return None


def _empty_us(timer: Timer) -> float | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from dsv4.bench.empty_triton import empty

    return timer.microseconds([empty] * timer.max_calls)
