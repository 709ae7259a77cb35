"""The tensors behind a layout: allocated here, or adopted from an engine that owns the memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.errors import ConfigError
from dsv4.pool.layout import PoolLayout, TableSpec


def allocate(layout: PoolLayout, device: torch.device) -> dict[str, Tensor]:
    """One uninitialised tensor per table; ConfigError if the device cannot hold them."""
    tensors: dict[str, Tensor] = {}
    for table in layout.tables:
        try:
            tensors[table.name] = torch.empty(table.shape, dtype=table.dtype, device=device)
        except RuntimeError as error:
            total = sum(other.nbytes for other in layout.tables)
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{table.name}: {table.nbytes} of the pool's {total} bytes cannot be had on {device} "
                f"({reason}); lower max_requests, max_context or num_pages"
            ) from error
    return tensors


def adopt(
    layout: PoolLayout, device: torch.device, storage: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The given tensors, one per table by name. ConfigError lists everything that is wrong with them."""
    names = {table.name for table in layout.tables}
    problems = [f"{name} is not a table of this pool" for name in sorted(storage.keys() - names)]
    for table in layout.tables:
        if table.name not in storage:
            problems.append(f"{table.name} is missing ({_wanted(table)})")
        else:
            problems += _problems(table, storage[table.name], device)
    if problems:
        raise ConfigError(
            f"storage: {'; '.join(problems)}; pass exactly the tables that storage_tables lists"
        )
    return {table.name: storage[table.name] for table in layout.tables}


def _problems(table: TableSpec, tensor: Tensor, device: torch.device) -> list[str]:
    if tuple(tensor.shape) != table.shape or tensor.dtype != table.dtype:
        given = f"{tensor.dtype} {list(tensor.shape)}"
        return [f"{table.name} is {given}, needed is {_wanted(table)}"]
    if tensor.device.type != device.type or (device.index or 0) != (tensor.device.index or 0):
        return [f"{table.name} is on {tensor.device}, the pool on {device}"]
    return _stride_problems(table, tensor)


def _stride_problems(table: TableSpec, tensor: Tensor) -> list[str]:
    """Rows may be apart, but not interleaved or overlapping."""
    if tensor.numel() == 0:
        return []
    width = tensor.shape[-1] if tensor.dim() > 1 else 1
    dense = tensor.stride(-1) == 1
    apart = tensor.dim() == 1 or tensor.shape[0] == 1 or tensor.stride(0) >= width
    if dense and apart:
        return []
    return [
        f"{table.name} has strides {list(tensor.stride())}, needed are dense rows that do not overlap"
    ]


def _wanted(table: TableSpec) -> str:
    return f"{table.dtype} {list(table.shape)}"
