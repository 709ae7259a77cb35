"""The examples run on any checkpoint with a byte tokenizer, say what they promise, and fail in one line."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.model.checkpoint import save_checkpoint
from dsv4.model.decoder import Decoder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Load = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def load() -> Load:
    """An example's names, loaded once and without running it."""
    loaded: dict[str, dict[str, Any]] = {}

    def names(example: str) -> dict[str, Any]:
        if example not in loaded:
            loaded[example] = runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name=example)
        return loaded[example]

    return names


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> str:
    """The shape of golden/quant/qat, which rounds its KV, with random weights and a byte vocabulary."""
    config = attrs.evolve(
        ModelConfig.from_json(golden / "quant" / "qat" / "config_official_style.json"),
        vocab_size=320,
        bos_token_id=256,
        eos_token_id=257,
        tokenizer="byte",
        kv_quant="official",
    ).without_drafts()
    decoder = Decoder(config)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in decoder.official_tensors().values():
            if tensor.stored == "i64":
                tensor.view.random_(config.n_routed_experts, generator=chance)
            elif tensor.view.dim() > 1:
                tensor.view.normal_(0.0, 0.2, generator=chance)
    folder = tmp_path_factory.mktemp("examples") / "checkpoint"
    save_checkpoint(decoder, config, folder)
    return str(folder)


def test_the_composed_backends_of_both_pools_print_the_same_text(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compose_backend.py", checkpoint])
    runpy.run_path(str(EXAMPLES / "compose_backend.py"), run_name="__main__")
    texts: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        pool, _, text = line.partition(" ")
        texts.setdefault(pool, []).append(text)
    assert list(texts) == ["UnifiedPoolConfig", "ThreePoolConfig"]
    unified, three = texts.values()
    assert len(unified) == 2
    assert unified == three


def test_decoding_by_hand_accepts_all_of_a_draft_that_it_decoded_itself(
    load: Load, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("decode")["main"]([checkpoint]) == 0
    out = capsys.readouterr().out
    assert "slot 1 joined with a prompt of 35 tokens" in out
    assert "slot 2 is a fork of slot 1 and holds 40 tokens" in out
    assert "slot 0 rolled back from 88 tokens to 76" in out
    assert "11 of 11 drafted tokens kept, 88 tokens again" in out


def test_all_pools_that_must_agree_do(
    load: Load, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("compare_pools")["main"]([checkpoint, "--max-new-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert out.count(">>>") == 6
    assert "same tokens: yes" in out
    rows = [line.split()[:2] for line in out.splitlines() if line[:7] in ("unified", "three-p")]
    assert rows == [
        [pool, rows] for rows in ("fp32", "bf16", "fp8") for pool in ("unified", "three-pool")
    ]


def result(load: Load, pool: str, rows: str, *tokens: int) -> Any:
    return load("compare_pools")["Result"](
        pool=pool,
        row_format=rows,
        tokens=(tokens,),
        texts=("",),
        bytes_per_token=1.0,
        bytes_per_slot=1,
        tokens_per_second=1.0,
    )


@pytest.mark.parametrize(
    ("official", "expected"),
    [
        (True, [["unified fp32", "three fp32"], ["unified bf16", "three bf16", "unified fp8"]]),
        (
            False,
            [["unified fp32", "three fp32"], ["unified bf16", "three bf16"], ["unified fp8"]],
        ),
    ],
)
def test_pools_of_equal_values_must_agree(
    load: Load, official: bool, expected: list[list[str]]
) -> None:
    names = ["unified fp32", "three fp32", "unified bf16", "three bf16", "unified fp8"]
    results = [result(load, *name.split(), 1) for name in names]
    found = load("compare_pools")["groups"](results, official)
    assert [[f"{r.pool} {r.row_format}" for r in group] for group in found] == expected


def test_one_pool_that_leaves_the_others_is_exit_status_1(
    load: Load,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(model: object, combinations: list[tuple[str, str]], max_new_tokens: int) -> Any:
        for pool, rows in combinations:
            odd = (pool, rows) == ("three-pool", "fp8")
            yield result(load, pool, rows, 1, 2, 4 if odd else 3)

    main = load("compare_pools")["main"]
    monkeypatch.setitem(main.__globals__, "run", run)
    monkeypatch.setitem(main.__globals__, "PROMPTS", ("one",))
    assert main([checkpoint]) == 1
    out = capsys.readouterr().out
    assert "same tokens: NO" in out
    assert out.splitlines()[-3].endswith("prompt 1 differs from token 3 on")


def test_an_interrupted_comparison_is_one_line_and_keeps_what_it_printed(
    load: Load,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(model: object, combinations: list[tuple[str, str]], max_new_tokens: int) -> Any:
        yield result(load, *combinations[0], 1)
        if len(combinations) > 1:
            raise KeyboardInterrupt

    main = load("compare_pools")["main"]
    monkeypatch.setitem(main.__globals__, "run", run)
    monkeypatch.setitem(main.__globals__, "PROMPTS", ("one",))
    assert main([checkpoint]) == 130
    captured = capsys.readouterr()
    assert captured.err == "compare_pools: interrupted\n"
    assert "one>>>" in captured.out
    assert captured.out.splitlines()[-1].split()[:2] == ["unified", "fp32"]


def test_a_continuation_is_shown_up_to_its_last_line_end(load: Load) -> None:
    whole_lines = load("compare_pools")["whole_lines"]
    assert whole_lines(" path:\n    return\n\nde") == " path:\n    return"
    assert whole_lines(" no line end") == " no line end"
    assert whole_lines("\nde") == "\nde"


def test_a_text_that_ends_early_differs_from_its_end_on(load: Load) -> None:
    difference = load("compare_pools")["difference"]
    assert difference(((1, 2), (3,)), ((1, 2), (3,))) == "same"
    assert difference(((1, 2), (3,)), ((1, 2), (3, 4))) == "prompt 2 differs from token 2 on"


@pytest.mark.parametrize("example", ["decode", "compare_pools"])
def test_a_folder_without_checkpoint_is_one_line(
    load: Load, example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(example)["main"]([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"{example}: error: {tmp_path}: no config.json")
