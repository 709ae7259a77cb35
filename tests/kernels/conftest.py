"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.bf16_guard import Bf16Guard, bf16_guard


# Of the session, so that tests over drawn examples may ask for it.
@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: natively if there is a GPU, else through the interpreter on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def no_bf16_arithmetic() -> Iterator[Bf16Guard]:
    """Fails a test in which a kernel computes on bf16 values, or casts to bf16 without rounding first."""
    with bf16_guard() as guard:
        yield guard
    assert not guard.faults, sorted(guard.faults)
