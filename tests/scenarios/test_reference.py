"""REF itself: right on the golden fixtures, so that being equal to REF means something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.config import ModelConfig
from dsv4.model.checkpoint import load_weights
from dsv4.model.decoder import Decoder
from tests.scenarios.harness import MARGIN, truth
from tests.scenarios.reference import Reference
from tests.scenarios.weights import weights_of


@pytest.mark.parametrize("folder", ["tiny", "pubrates", "quant/qat"])
def test_ref_reproduces_the_golden_fixtures(golden: Path, folder: str) -> None:
    config = ModelConfig.from_json(golden / folder / "config.json")
    decoder = Decoder(config)
    load_weights(decoder, golden / folder / "weights.safetensors")
    reference = Reference(config, weights_of(decoder))
    for file in sorted((golden / folder).glob("prompt*.safetensors")):
        stored = load_file(file)
        run = reference.run(stored["input_ids"][0].tolist())
        assert (run.logits - stored["prefill.logits"][0]).abs().max() <= 5e-5
        for index in run.attn_out:
            assert (
                run.attn_out[index] - stored[f"prefill.attn_out.{index}"][0]
            ).abs().max() <= 5e-5
        for index, entries in run.entries.items():
            expected = stored[f"prefill.compressed_kv.{index}"][0]
            torch.testing.assert_close(entries, expected, atol=5e-5, rtol=1e-4)
        for index in run.index_keys:
            expected = stored[f"prefill.index_topk.{index}"][0].tolist()
            assert run.picks[index] == [sorted({e for e in row if e >= 0}) for row in expected]


def test_a_truth_has_no_close_choice() -> None:
    run = truth(96).run
    assert MARGIN < run.index_margin < 1
    assert MARGIN < run.router_margin < 1


def test_tiny_logits_depend_on_the_whole_prefix() -> None:
    """Otherwise a lost entry could hide: another first token must show at the last position."""
    from tests.scenarios.weights import tiny_decoder

    decoder, ids = tiny_decoder(), truth(96).ids
    changed = Reference(decoder.config, weights_of(decoder)).run([(ids[0] + 1) % 64, *ids[1:]])
    assert (changed.logits[-1] - truth(96).logits[-1]).abs().max() > 1e-3
