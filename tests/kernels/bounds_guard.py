"""Finds loads and stores outside the tensors that a kernel was given, while the interpreter runs it.

On a GPU such an access may hit a neighbour's memory and go unseen; here each address is held against the storages of
the launch's arguments. Kernels that take addresses from a table in memory are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import define, field
from triton.runtime import interpreter

ADDRESS_TABLES = frozenset({"_fill_kernel"})


@define
class BoundsGuard:
    """Descriptions of what went wrong, one per kernel and kind of access."""

    faults: set[str] = field(factory=set)
    kernels: set[str] = field(factory=set)
    _name: str = ""
    _ranges: list[tuple[int, int]] = field(factory=list)

    def enter(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._name = name
        self.kernels.add(name)
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        storages = [x.untyped_storage() for x in tensors]
        self._ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def check(self, kind: str, addresses: Any, mask: Any, itemsize: int) -> None:
        if self._name in ADDRESS_TABLES:
            return
        hit = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, mask.shape))
        hit = hit[np.broadcast_to(mask, hit.shape)].astype(np.int64)
        inside = np.zeros(hit.shape, dtype=bool)
        for start, end in self._ranges:
            inside |= (hit >= start) & (hit + itemsize <= end)
        if not inside.all():
            self.faults.add(f"{self._name}: {kind} outside its arguments")


@contextmanager
def bounds_guard() -> Iterator[BoundsGuard]:
    """Watches every launch until it is left."""
    guard = BoundsGuard()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        guard.check("load", ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.check("store", ptrs.data, mask.data, value.data.dtype.itemsize)
        return store(self, ptrs, value, mask, *rest)

    def watched_call(self: Any, *args: Any, **options: Any) -> Any:
        guard.enter(self.fn.__name__, args, options)
        return call(self, *args, **options)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    executor.__call__ = watched_call
    try:
        yield guard
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor.__call__ = call
