"""Time of calls inside a CUDA graph: no host time, an empty L2, untouched inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from dsv4.bench.timing import Call, Timer
from dsv4.errors import KernelError

FLUSH_BYTES = 2 * 10**9
"""Read before each replay: many times any L2, and long enough that the host queues the replay meanwhile."""
REPLAYS = 15


class GraphTimer(Timer):
    """Captures all calls into one graph and replays it. A time includes the gap between two nodes of a graph: about
    what an empty kernel costs."""

    method: ClassVar[str] = (
        f"CUDA-graph replay, each call with its own inputs, {FLUSH_BYTES // 10**9} GB read before each replay, "
        f"median of {REPLAYS}"
    )
    max_calls: ClassVar[int] = 96

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=device)
        self._sum = torch.zeros((), device=device)

    def samples(self, calls: Sequence[Call]) -> list[float]:
        graph = self._captured(calls)
        events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(REPLAYS)
        ]
        for start, end in events:
            torch.sum(self._flush, dim=0, out=self._sum)
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) * 1e3 / len(calls) for start, end in events]

    def _captured(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """Each call runs once outside the graph first: kernels compile and libraries take their workspaces then."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            torch.cuda.synchronize(self._device)
            try:
                with torch.cuda.graph(graph, stream=stream):
                    for call in calls:
                        call()
            except RuntimeError as error:
                raise KernelError(
                    f"a call cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); "
                    "measure another kernel set"
                ) from error
        torch.cuda.synchronize(self._device)
        return graph
