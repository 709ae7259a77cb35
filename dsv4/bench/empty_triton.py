"""A kernel that does nothing: what a node of a graph costs."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor


def _empty_kernel(ptr: Any) -> None:
    pass


_compiled = triton.jit(_empty_kernel)


def empty(tensor: Tensor) -> None:
    """Launch it."""
    _compiled[(1,)](tensor)
