"""Which kernel set, on which device, the tests of whole forwards run: pytest's --kernels and --device.

By default torch on the CPU. `--kernels triton` without a GPU runs in Triton's interpreter; with `--device cuda` every
tensor that a test makes lies there, unless it says otherwise.
"""

from __future__ import annotations

import pytest
import torch

from dsv4 import registry
from dsv4.kernels.base import KernelSet

KERNELS = "torch"
DEVICE = torch.device("cpu")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", default=KERNELS, help="kernel set of the tests of whole forwards")
    parser.addoption("--device", default=str(DEVICE), help="device of the tests of whole forwards")


def choose(config: pytest.Config) -> None:
    global KERNELS, DEVICE
    KERNELS, DEVICE = config.getoption("--kernels"), torch.device(config.getoption("--device"))
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)


def generator(seed: int) -> torch.Generator:
    """Of the chosen device, where tensors are made by default."""
    return torch.Generator(DEVICE).manual_seed(seed)


def ops(deterministic: bool = False) -> KernelSet:
    """The chosen set."""
    return registry.kernel_family(KERNELS).build(deterministic=deterministic)
