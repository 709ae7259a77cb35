"""On a GPU: the ops of the attention path call neither torch's allocator nor the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dsv4
from dsv4.backend import Backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="counts a GPU's allocator")

METHODS = {
    "store": ("store", "store_tail"),
    "compress": ("overlap", "fold"),
    "score": ("queries", "score"),
    "select": ("select",),
    "attend": ("attend",),
}
CALLS = 100


class Watched:
    """Passes calls on and counts them, and the allocations that happened in them; a sync in one raises."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.allocations: Counter[str] = Counter()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = call(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            self.calls[name] += 1
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
            self.allocations[name] += after - before
            return result

        return watched

    def watch(self, backend: Backend) -> None:
        backend.builder._fill.fill = self.wrap("fill", backend.builder._fill.fill)
        for op, methods in METHODS.items():
            kernel = getattr(backend.kernels, op)
            for method in methods:
                setattr(kernel, method, self.wrap(f"{op}.{method}", getattr(kernel, method)))


@pytest.mark.parametrize("row_format", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("pool", [dsv4.UnifiedPoolConfig, dsv4.ThreePoolConfig])
def test_a_hundred_forwards_neither_allocate_nor_wait_in_the_attention_path(
    pool: type[dsv4.PoolConfig], row_format: str
) -> None:
    config = dsv4.BackendConfig(
        pool=pool(max_requests=8, max_context=2048, row_format=row_format), kernels="triton",
        max_batch_tokens=1024,
    )  # fmt: skip
    model = dsv4.load("tiny", backend=config, device="cuda")
    memory = model.backend.pool
    slots = [memory.acquire() for _ in range(4)]
    for slot in slots:
        memory.reserve(slot, 1024)
    ids = [[(7 * slot + 3 * i) % 256 for i in range(300 - 70 * slot)] for slot in slots]
    batch = dsv4.ForwardBatch.of(list(zip(slots, ids, strict=True)))
    counted = Watched()
    for call in range(CALLS + 2):
        if call == 2:  # compiled and warm
            counted.watch(model.backend)
        model.forward(batch)
        if call % 10 == 0:
            for slot, n in zip(batch.slots, batch.query_lengths, strict=True):
                memory.commit(slot, n)
            batch = dsv4.ForwardBatch.of([(slot, [call]) for slot in slots])
    assert set(counted.calls) >= {
        "fill",
        "store.store",
        "compress.fold",
        "score.score",
        "attend.attend",
    }
    assert counted.calls["fill"] == CALLS
    assert sum(counted.allocations.values()) == 0, counted.allocations
