"""--threads of generate, verify and bench: how many threads torch is told to use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dsv4.cli import arguments, build_parser
from tests.cli.conftest import Run


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch.set_num_threads was called with; the process keeps its own setting."""
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    return calls


@pytest.mark.parametrize(
    ("device", "hidden_size", "words", "wanted"),
    [
        ("cpu", 1024, (), [1]),
        ("cpu", 1025, (), []),
        ("cuda:0", 256, (), []),
        ("cpu", 256, ("--threads", "auto"), [1]),
        ("cpu", 256, ("--threads", "8"), [8]),
        ("cuda", 7168, ("--threads", "3"), [3]),
    ],
)
def test_auto_is_one_thread_for_small_models_on_the_cpu(
    told: list[int], device: str, hidden_size: int, words: tuple[str, ...], wanted: list[int]
) -> None:
    args = build_parser().parse_args(["bench", "step", "--device", device, *words])
    arguments.set_threads(args, hidden_size)
    assert told == wanted


def test_each_command_that_computes_sets_them(
    run: Run, told: list[int], checkpoint: Path, golden: Path, tmp_path: Path
) -> None:
    shutil.copy(golden / "quant" / "primitives.safetensors", tmp_path)
    sizes = ("--lengths", 6, "--batches", 1, "--steps", 1, "--repeats", 1)
    commands = (
        ("generate", checkpoint, "--prompt", "a", "--max-new-tokens", 1),
        ("bench", "step", "--checkpoint", checkpoint, *sizes),
        ("verify", tmp_path),
    )
    for command in commands:
        assert run(*command, "--threads", 2).status == 0
        assert run(*command).status == 0
    assert told == [2, 1] * 3


def test_the_record_of_a_benchmark_names_them(run: Run, checkpoint: Path) -> None:
    words = ("--lengths", 6, "--batches", 1, "--steps", 1, "--repeats", 1, "--threads", 1, "--json")
    found = json.loads(run("bench", "step", "--checkpoint", checkpoint, *words).out)
    assert found["machine"]["threads"] == 1


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "9", "4K"])
def test_other_numbers_of_threads_are_refused(run: Run, told: list[int], text: str) -> None:
    assert (
        f"'{text}' is no number of threads from 1 to 8"
        in run("bench", "step", f"--threads={text}").error
    )
    assert told == []
