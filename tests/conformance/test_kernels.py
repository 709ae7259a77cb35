"""The torch kernel set keeps every promise of the op interfaces, deterministic or not."""

from __future__ import annotations

import pytest

from dsv4.kernels.base import KernelSet
from dsv4.kernels.torch_set import TorchKernels
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


@pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return TorchKernels.build(deterministic=request.param)


class OneOp:
    """Gives the suites the op that the class names."""

    op: str

    @pytest.fixture
    def kernel(self, kernels: KernelSet) -> object:
        return getattr(kernels, self.op)


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
