"""Makes Triton's interpreter several times faster: it prepares triton.language once a launch, not at each call.

The interpreter replaces the functions of triton.language while a kernel runs. It searches them all again whenever a
device function is called, 1 to 2 ms each, although nothing is left to replace.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

EVERYTHING = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
"""Looks like a kernel that uses every module which the interpreter changes."""


class OncePerLaunch:
    """Stands in for the interpreter's function that prepares triton.language."""

    def __init__(self, prepare: Any) -> None:
        self.prepare = prepare
        self.scope: Any = None

    def __call__(self, _fn: Any) -> Any:
        if self.scope is not None:
            return SimpleNamespace(restore=lambda: None)
        self.scope = self.prepare(EVERYTHING)
        return self

    def restore(self) -> None:
        self.scope.restore()
        self.scope = None


def speed_up() -> None:
    """For the rest of the process; twice is once."""
    if not isinstance(interpreter._patch_lang, OncePerLaunch):
        interpreter._patch_lang = OncePerLaunch(interpreter._patch_lang)
