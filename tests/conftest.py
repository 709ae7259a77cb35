"""Fixtures and settings that every test shares."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import run_on

# Decided when triton is imported, so before any test imports a kernel: without a GPU they run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

TESTS = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    run_on.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    run_on.choose(config)
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton") is not None:
        # imported only now: triton asks the environment when it is first imported
        from tests.kernels.quick_interpreter import speed_up

        speed_up()


# Tensors are tiny here and test processes share the cores: more threads only wait for each other.
torch.set_num_threads(1)

# The same examples in every run, on every machine; time limits would fail on a busy one.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden numbers, with the sub-folders tiny, pubrates and quant."""
    return TESTS / "data" / "golden"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of documents and data beside the repository; tests that ask for it skip without it."""
    path = Path(os.environ.get("DSV4_SHARED", TESTS.parents[1] / "shared"))
    if not path.is_dir():
        pytest.skip(f"no folder {path}; set DSV4_SHARED to its place")
    return path
