"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest
import torch


# Of the session, so that tests over drawn examples may ask for it.
@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: natively if there is a GPU, else through the interpreter on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
