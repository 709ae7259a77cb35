"""A small random checkpoint with the byte tokenizer, and a way to run a command in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from dsv4.cli import main
from dsv4.config import ModelConfig
from dsv4.model.checkpoint import save_checkpoint
from dsv4.model.decoder import Decoder


@attrs.frozen
class Outcome:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error; fails if there is more or less of it."""
        assert self.status == 2
        assert self.out == ""
        assert self.err.count("\n") == 1
        assert self.err.startswith("dsv4: error: ")
        assert "Traceback" not in self.err
        return self.err


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("plan", "--model", "flash")` -> its outcome."""

    def command(*argv: object) -> Outcome:
        status = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return command


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    """The shape of golden/tiny with random weights and a byte vocabulary, as a checkpoint folder."""
    config = attrs.evolve(
        ModelConfig.from_json(golden / "tiny" / "config.json"),
        vocab_size=320,
        bos_token_id=256,
        eos_token_id=257,
        tokenizer="byte",
    )
    decoder = Decoder(config)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in decoder.official_tensors().values():
            if tensor.stored == "i64":
                tensor.view.random_(config.n_routed_experts, generator=chance)
            elif tensor.view.dim() > 1:
                tensor.view.normal_(0.0, 0.2, generator=chance)
    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    save_checkpoint(decoder, config, folder)
    return folder
