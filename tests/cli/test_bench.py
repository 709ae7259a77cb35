"""dsv4 bench: the record and its rows, at small sizes."""

from __future__ import annotations

import json
import os
import re
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
    head, names, *rows = outcome.out.splitlines()
    assert re.fullmatch(
        r"cpu .+, cores \d+, threads \d+, .*; dsv4 [\d.]+, python .*, torch .*; .* UTC", head
    )
    assert names.split() == ["batch", "prompt", "tok/s", "ms", "ms/step"]
    for row in rows:
        what, batch, _, speed, ms = row.split()
        if what == "decode":
            assert float(ms) == pytest.approx(
                int(batch) / float(speed.replace(",", "")) * 1e3, rel=0.02
            )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused_before_measuring(
    run: Run, tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    assert "may not be written" in run("bench", "step", "--out", tmp_path / "step.json").error


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
        (("--out", "nowhere/step.json"), "--out nowhere/step.json: no folder nowhere"),
        (("--plot", "nowhere/step.png"), "--plot nowhere/step.png: no folder nowhere"),
        (("--out", "/"), "is a folder"),
    ],
)
def test_bad_input_is_one_line_that_names_it(run: Run, words: tuple[str, ...], named: str) -> None:
    assert named in run("bench", "step", *words).error
