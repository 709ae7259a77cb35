"""The Triton set against the golden numbers, in the interpreter or on a GPU; the shortest prompts of every folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from dsv4.verify import VerifyOptions, verify

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.mark.parametrize("pool", ["unified", "three-pool"])
@pytest.mark.parametrize(
    ("folder", "longest", "checks"),
    [("tiny", 5, 50), ("pubrates", 20, 40), ("quant/qat", 29, 14)],
)
def test_every_tensor_of_the_shortest_prompt_is_within_its_limit(
    pool: str, folder: str, longest: int, checks: int
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = VerifyOptions(
        pools=(pool,), kernels="triton", device=device, chunkings=1, longest=longest
    )
    report = verify(GOLDEN / folder, options)
    assert [f"{c.subject} {c.name} {c.max_error}" for c in report.failures] == []
    assert len(report.checks) >= checks


@pytest.mark.parametrize("folder", ["quant/qat"])
def test_layers_in_bf16_are_within_their_limits(folder: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = VerifyOptions(
        pools=("unified",), kernels="triton", device=device, dtype="bfloat16", longest=29
    )
    assert verify(GOLDEN / folder, options).ok
