"""A forward's shared tensors without a pool's tables: what address kernels need is lengths and block tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import torch
from attrs import frozen

from dsv4 import registry
from dsv4.config import ModelConfig, UnifiedPoolConfig
from dsv4.metadata.base import FillKernel
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, buffer_specs
from dsv4.metadata.forward import SharedTensors
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PoolGeometry


@frozen(kw_only=True, eq=False)
class BareForward:
    """Input buffers of one forward, and the shape that a graph of it would be captured for."""

    model: ModelConfig
    geometry: PoolGeometry
    pool: KVPool
    """Its lengths, block table and device; it has nothing else."""
    buffers: Buffers
    shape: BatchShape

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        lengths: Sequence[int],
        query_lengths: Sequence[int],
        device: torch.device,
        *,
        max_context: int,
    ) -> BareForward:
        """Request b in slot b; every slot can reach max_context, its pages in random order."""
        config = UnifiedPoolConfig(max_requests=len(lengths), max_context=max_context)
        config = config.resolved(model)
        geometry = registry.pool_class(config).geometry_of(config, model)
        pages = torch.randperm(geometry.num_pages, device=device).int()
        pool = SimpleNamespace(
            device=device,
            lengths=torch.tensor(list(lengths), dtype=torch.int32, device=device),
            block_table=pages.view(len(lengths), geometry.pages_per_slot),
        )
        shape = BatchShape(
            num_tokens=sum(query_lengths),
            num_requests=len(lengths),
            max_query_tokens=max(query_lengths),
            max_length=max_context,
            query_lengths=tuple(query_lengths),
        )
        buffers = Buffers(buffer_specs(model, geometry, shape), device)
        starts = [0]
        for num in query_lengths:
            starts.append(starts[-1] + num)
        inputs = {
            "slots": [*range(len(lengths)), -1],
            "starts": starts,
            "query_lengths": [*query_lengths, 0],
            "token_ids": [0] * starts[-1],
        }
        for name, values in inputs.items():
            buffer = buffers.tensors[name]
            buffer.copy_(torch.tensor(values, dtype=buffer.dtype))
        return cls(
            model=model,
            geometry=geometry,
            pool=cast(KVPool, pool),
            buffers=buffers,
            shape=shape,
        )

    def filler(self, kernel: type[FillKernel]) -> FillKernel:
        """The kernel over this forward's buffers."""
        return kernel(self.model, self.geometry, self.pool, self.buffers)

    def fill(self, kernel: type[FillKernel]) -> SharedTensors:
        return self.filler(kernel).fill(self.shape)
