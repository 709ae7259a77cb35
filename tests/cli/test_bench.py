"""dsv4 bench: the record and its rows, at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SMALL = ("--lengths", "6,20", "--batches", "1,2", "--steps", "2", "--repeats", "2")


def test_step_records_prefill_and_decode_of_every_size(
    run: Run, golden: Path, tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    outcome = run("bench", "step", "--golden", golden / "tiny", *SMALL, "--json", "--out", file)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert found == json.loads(file.read_text())
    assert {"machine", "versions", "command", "date", "rows"} <= set(found)
    assert found["command"].startswith("dsv4 bench step --golden ")
    sizes = [(row["what"], row["batch"], row["prompt_tokens"]) for row in found["rows"]]
    assert sizes == [
        (what, batch, length)
        for length in (6, 20)
        for what, batch in (("prefill", 1), ("decode", 1), ("decode", 2))
    ]
    for row in found["rows"]:
        assert row["seconds_least"] <= row["seconds"] <= row["seconds_most"]
        tokens = row["prompt_tokens"] if row["what"] == "prefill" else 2 * row["batch"]
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"], rel=1e-3)


def test_step_measures_a_checkpoint_on_the_three_pool(run: Run, checkpoint: Path) -> None:
    outcome = run("bench", "step", "--checkpoint", checkpoint, "--pool", "three-pool", *SMALL)
    assert outcome.status == 0, outcome.err
    assert "decode" in outcome.out


@pytest.mark.parametrize(
    "name", ["attend", "prefill", "fill", "store", "compress", "score", "select"]
)
def test_kernel_benches_say_that_they_need_kernels(run: Run, name: str) -> None:
    assert f"bench {name}: not available" in run("bench", name).error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--lengths", "4x"), "4x"),
        (("--repeats", "0"), "repeats"),
        (("--golden", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_line_that_names_it(run: Run, words: tuple[str, ...], named: str) -> None:
    assert named in run("bench", "step", *words).error
