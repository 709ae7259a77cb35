"""The entry point: help, misuse, interruption, closed pipes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dsv4 import cli
from dsv4.cli import build_parser, info
from tests.cli.conftest import Run

COMMANDS = ("generate", "verify", "plan", "bench", "info", "map")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        build_parser().parse_args([command, "--help"])
    assert left.value.code == 0
    assert "usage: dsv4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [("decode",), ("plan",), ("info", "--jsn"), ("bench", "nothing"), ("map",)]
)
def test_misuse_is_one_line(run: Run, argv: tuple[str, ...]) -> None:
    run(*argv).error  # noqa: B018  # the property is the assertion


def test_an_interruption_is_130_without_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "_devices", interrupted)
    outcome = run("info")
    assert (outcome.status, outcome.err) == (130, "dsv4: interrupted\n")


def test_an_interruption_of_the_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    status = cli.main(["info"])
    monkeypatch.undo()
    assert status == 130
    assert capsys.readouterr().err == "dsv4: interrupted\n"


def test_the_entry_point_is_imported_without_torch() -> None:
    code = "import sys, dsv4.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_arguments_the_help_is_printed(run: Run) -> None:
    outcome = run()
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("usage: dsv4")
    assert all(f"\n    {command}" in outcome.err for command in COMMANDS)


def test_memory_exhaustion_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted() -> dict[str, str]:
        raise MemoryError

    monkeypatch.setattr(info, "_devices", exhausted)
    assert "out of memory" in run("info").error


def test_a_failed_allocation_is_one_line_and_other_faults_are_not_hidden(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "_devices", lambda: {"cpu": str(torch.empty(10**15))})
    assert "out of memory" in run("info").error

    def broken() -> dict[str, str]:
        raise RuntimeError("a fault of this library")

    monkeypatch.setattr(info, "_devices", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        run("info")


def test_python_m_dsv4_runs_it_and_a_closed_pipe_is_silent() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dsv4", "map", "--model", "flash"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()
