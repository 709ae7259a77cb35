"""Catches what Triton's interpreter does wrongly and silently with bf16: it computes on the bits as if on integers.

Its fp32 -> bf16 cast cuts off instead of rounding, too. Kernels upcast on load, compute in fp32, and round with
`dsv4.kernels.tile_triton.cast` at the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from attrs import define, field
from triton.runtime import interpreter

from dsv4.triton_launch import interpreting

MOVES = {
    "load", "masked_load", "store", "masked_store", "reshape", "trans", "gather", "expand_dims", "broadcast", "cat",
    "join", "split", "splat", "unsplat", "select", "bitcast", "fp_ext", "fp_trunc", "fp_to_fp", "int_to_ptr",
    "atomic_load", "atomic_store",
}  # fmt: skip
"""Builder operations that only move or convert values."""
CONVERSIONS = {"fp_trunc", "fp_to_fp", "si_to_fp", "ui_to_fp"}


@define
class Bf16Guard:
    """What kernels did while the guard was up."""

    launched: set[str] = field(factory=set)
    """Names of kernels."""
    faults: set[str] = field(factory=set)
    kernel: str = ""

    def fault(self, what: str) -> None:
        self.faults.add(f"{self.kernel}: {what}")

    def check(self, operation: str, args: tuple[Any, ...]) -> None:
        """One call of the interpreter's builder."""
        handles = [arg for arg in args if isinstance(arg, interpreter.TensorHandle)]
        if operation not in MOVES and any(_is_bf16(handle.dtype) for handle in handles):
            self.fault(f"{operation} on bf16")
        if operation in CONVERSIONS and _is_bf16(args[1]) and not _is_bf16(args[0].dtype):
            if not _exact(args[0]):
                self.fault(f"{operation} to bf16 that is not exact; use tile_triton.cast")


def _is_bf16(dtype: Any) -> bool:
    return bool(dtype.scalar == tl.bfloat16)


def _exact(handle: Any) -> bool:
    data = handle.data
    if data.dtype != np.float32:
        return False
    return not np.any(np.ascontiguousarray(data).view(np.uint32) & 0xFFFF)


@contextmanager
def bf16_guard() -> Iterator[Bf16Guard]:
    """Watch every kernel that runs inside; does nothing where kernels run natively."""
    guard = Bf16Guard()
    with pytest.MonkeyPatch.context() as patch:
        if interpreting():
            _watch(guard, patch)
        yield guard


def _watch(guard: Bf16Guard, patch: pytest.MonkeyPatch) -> None:
    builder = interpreter.InterpreterBuilder
    for name in dir(builder):
        if name.startswith("create_"):
            _before(patch, builder, name, _checker(guard, name.removeprefix("create_")))

    def reduced(_scan: Any, tensors: Any) -> None:
        # Known combinations are computed by numpy, past the builder.
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            if _is_bf16(tensor.dtype):
                guard.fault("reduction of bf16")

    def launched(executor: Any) -> None:
        guard.kernel = executor.fn.__name__
        guard.launched.add(guard.kernel)

    _before(patch, interpreter.ReduceScanOpInterface, "apply", reduced)
    _before(patch, interpreter.GridExecutor, "__call__", lambda executor, *_: launched(executor))


def _checker(guard: Bf16Guard, operation: str) -> Callable[..., None]:
    return lambda _builder, *args: guard.check(operation, args)


def _before(patch: pytest.MonkeyPatch, owner: type, name: str, check: Callable[..., None]) -> None:
    """Run `check` with the positional arguments of each call of a method."""
    method = getattr(owner, name)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args)
        return method(self, *args, **kwargs)

    patch.setattr(owner, name, watched)
