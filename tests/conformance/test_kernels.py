"""Both kernel sets keep every promise of the op interfaces, deterministic or not.

The Triton set runs on a GPU where there is one, else in the interpreter.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dsv4.kernels.base import KernelFamily
from dsv4.kernels.torch_set import TorchKernels
from dsv4.kernels.triton_set import TritonKernels
from dsv4.testing import (
    AttentionConformance,
    CompressConformance,
    ExpertsConformance,
    LinearConformance,
    MixConformance,
    NormConformance,
    ScoreConformance,
    SelectConformance,
    StoreConformance,
)

SETS: dict[str, type[KernelFamily]] = {"torch": TorchKernels, "triton": TritonKernels}


@pytest.fixture(params=SETS)
def set_name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return found


class OneOp:
    """Gives the suites the op that the class names, and where its set runs."""

    op: str

    @pytest.fixture
    def device(self, set_name: str) -> torch.device:
        native = set_name == "triton" and torch.cuda.is_available()
        return torch.device("cuda" if native else "cpu")

    @pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
    def kernel(self, set_name: str, request: pytest.FixtureRequest) -> object:
        return getattr(SETS[set_name].build(deterministic=request.param), self.op)


class TestNorm(OneOp, NormConformance):
    op = "norm"


class TestStore(OneOp, StoreConformance):
    op = "store"


class TestLinear(OneOp, LinearConformance):
    op = "linear"


class TestMix(OneOp, MixConformance):
    op = "mix"


class TestExperts(OneOp, ExpertsConformance):
    op = "experts"


class TestScore(OneOp, ScoreConformance):
    op = "score"


class TestSelect(OneOp, SelectConformance):
    op = "select"


class TestAttention(OneOp, AttentionConformance):
    op = "attend"


class TestCompress(OneOp, CompressConformance):
    op = "compress"
