"""The dense training forward computes the model itself: golden logits of the spec's fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from tiny_training.dense import DenseForward, DenseMode
from tiny_training.regions import Regions

from tests.examples.golden_weights import golden_decoder

TOLERANCE = 5e-5  # golden/README.md: plain, for logits


@pytest.mark.parametrize("name", ["tiny", "pubrates", "quant/qat"])
def test_dense_logits_are_the_golden_prefill_logits(golden: Path, name: str) -> None:
    model = golden_decoder(golden / name)
    prompts = sorted((golden / name).glob("prompt*.safetensors"))
    assert prompts
    for path in prompts:
        stored = load_file(path)
        ids = stored["input_ids"]
        dense = DenseForward(model, ids.shape[1], DenseMode(drafts=False), Regions())
        error = (dense(ids).logits_BSV - stored["prefill.logits"]).abs().max()
        assert error <= TOLERANCE, path.name


@pytest.mark.parametrize("name", ["tiny", "pubrates"])
def test_dense_draft_logits_are_the_golden_mtp_logits(golden: Path, name: str) -> None:
    model = golden_decoder(golden / name)
    ids = load_file(next((golden / name).glob("prompt1_*")))["input_ids"]
    dense = DenseForward(model, ids.shape[1], DenseMode(), Regions())
    draft = dense(ids).draft_logits_BSV
    assert draft is not None
    # the last golden row pairs with a token after the prompt, which a training sequence does not have
    wanted = load_file(golden / name / "mtp.safetensors")["mtp.logits"][:, :-1]
    assert (draft[:, :-1] - wanted).abs().max() <= TOLERANCE


def test_sequences_of_a_batch_do_not_see_each_other(golden: Path) -> None:
    model = golden_decoder(golden / "quant" / "qat")
    ids = torch.randint(96, (3, 41), generator=torch.Generator().manual_seed(5))
    dense = DenseForward(model, 41, DenseMode(), Regions())
    together = dense(ids).logits_BSV
    for b in range(3):
        assert (dense(ids[b : b + 1]).logits_BSV[0] - together[b]).abs().max() <= 1e-5
