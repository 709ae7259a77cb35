"""The comparison with transformers, at a size that tests nothing but that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4")

from benchmarks import against_transformers  # needs the oracle


def test_it_records_decode_ragged_decode_and_prefill_with_their_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    sizes = ["--prompt-tokens", "20", "--steps", "2", "--repeats", "2", "--threads", "1"]
    against_transformers.main([*sizes, "--out", str(file)])
    found = json.loads(file.read_text())
    assert {"machine", "versions", "command", "date", "rows"} <= set(found)
    assert [(row["what"], row["batch"]) for row in found["rows"]] == [
        ("decode", 1),
        ("decode", 8),
        ("prefill", 1),
    ]
    assert found["rows"][1]["prompt_tokens"] == [20, 5, 10, 15, 2, 18, 8, 12]
    for row in found["rows"]:
        speeds = row["tokens_per_second"], row["transformers_tokens_per_second"]
        assert row["ratio"] == pytest.approx(speeds[0] / speeds[1], rel=1e-2)
    assert capsys.readouterr().out.count("ratio") == 3


def test_both_sides_run_the_same_model() -> None:
    sizes = against_transformers.Sizes(prompt_tokens=30, steps=6, repeats=1)
    ours, theirs = against_transformers.OurSide(sizes, "unified"), against_transformers.TheirSide()
    prompt = list(range(2, 32))
    with torch.inference_mode():
        slot = ours.engine.pool.acquire()
        logits = ours.engine.prefill(slot, prompt)
        output = theirs.prefill(prompt)
        torch.testing.assert_close(logits, output.logits[0], atol=5e-5, rtol=0)
