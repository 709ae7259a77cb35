"""dsv4 bench: the record and its rows, at small sizes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

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
    "name", ["attend", "prefill", "fill", "store", "compress", "score", "select", "experts"]
)
def test_an_operation_is_measured_on_a_cpu_in_small_shapes(run: Run, name: str) -> None:
    outcome = run("bench", name, "--kernels", "torch", "--models", "flash")
    assert outcome.status == 0, outcome.err
    machine, method, ceilings, names, *rows = outcome.out.splitlines()
    assert machine.startswith("cpu ")
    assert "kernels torch" in method
    assert "wall clock of small shapes" in method
    assert re.fullmatch(r"ceilings: copy .* GB/s, read .* GB/s, matmul .* TFLOP/s", ceilings)
    assert names.split()[:2] == ["us", "GB/s"]
    assert rows
    assert all(row.startswith("flash") for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without GPU")
def test_triton_kernels_are_measured_through_the_interpreter(run: Run) -> None:
    words = ("--kernels", "triton", "--models", "flash", "--only", "3 x 70", "--json")
    outcome = run("bench", "select", *words)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["kernels"] == "triton"
    assert [row["error"] for row in found["rows"]] == [0.0]


def test_an_operations_record_goes_to_a_file_and_to_the_screen(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "select.json"
    outcome = run("bench", "select", "--kernels", "torch", "--json", file)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("cpu ")
    found = json.loads(file.read_text())
    assert {"machine", "versions", "command", "date", "rows", "method", "ceilings", "peers"} <= set(
        found
    )
    assert {row["op"] for row in found["rows"]} == {"select"}
    assert {row["case"] for row in found["rows"]} == {"flash", "pro"}
    for flag in (("--json",), ("--json", "-")):
        outcome = run(
            "bench", "attend", "--kernels", "torch", "--batches", "2", "--only", "swa", *flag
        )
        assert [row["size"] for row in json.loads(outcome.out)["rows"]] == ["b=2"] * 2


def test_a_roofline_is_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for op in ("attend", "select"):
        picture = tmp_path / f"{op}.png"
        assert run("bench", op, "--kernels", "torch", "--plot", picture).status == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("op", ["step", "select"])
def test_a_missing_matplotlib_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib" in run("bench", op, "--plot", tmp_path / "x.png").error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--models", "large"), "'large' is no model; give flash, pro"),
        (("--kernels", "unknown"), "unknown"),
        (("--row-format", "fp7"), "fp7"),
        (("--index-format", "fp7"), "fp7"),
        (("--json", "nowhere/select.json"), "--json nowhere/select.json: no folder nowhere"),
    ],
)
def test_bad_options_of_an_operation_are_one_line(
    run: Run, words: tuple[str, ...], named: str
) -> None:
    assert named in run("bench", "select", *words).error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(run: Run) -> None:
    assert "no CUDA device" in run("bench", "attend", "--device", "cuda").error


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
