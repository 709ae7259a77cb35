"""dsv4 generate on a small random checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Run


def json_of(run: Run, *argv: object) -> Any:
    outcome = run("generate", *argv, "--json")
    assert outcome.status == 0, outcome.err
    return json.loads(outcome.out)


def test_json_has_the_documented_keys(run: Run, checkpoint: Path) -> None:
    found = json_of(run, checkpoint, "--prompt", "abc", "--max-new-tokens", 5)
    assert found["pool"] == "unified"
    assert found["kernels"] == "torch"
    assert found["kv_bytes"] > 0
    assert found["tokens_per_second"] > 0
    (completion,) = found["completions"]
    assert sorted(completion) == ["prompt_tokens", "text", "token_ids"]
    assert completion["prompt_tokens"] == 3
    assert len(completion["token_ids"]) == 5


def test_both_pools_and_the_batch_give_the_tokens_of_each_prompt_alone(
    run: Run, checkpoint: Path
) -> None:
    prompts = ["abc", "a much longer prompt, over several windows and entries", "x"]
    options = ("--max-new-tokens", 12, "--deterministic")
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    alone = [
        json_of(run, checkpoint, "--prompt", prompt, *options)["completions"][0]
        for prompt in prompts
    ]
    for pool in ("unified", "three-pool"):
        together = json_of(run, checkpoint, *words, *options, "--pool", pool)
        assert together["completions"] == alone
        assert together["pool"] == pool


def test_fewer_slots_and_smaller_chunks_change_no_token(run: Run, checkpoint: Path) -> None:
    words = ("--prompt", "first prompt", "--prompt", "second one", "--max-new-tokens", 6)
    wide = json_of(run, checkpoint, *words, "--deterministic")
    narrow = json_of(
        run, checkpoint, *words, "--deterministic", "--max-requests", 1, "--chunk-tokens", 3
    )
    assert narrow["completions"] == wide["completions"]
    assert (narrow["max_requests"], wide["max_requests"]) == (1, 2)


def test_a_seed_repeats_a_sample(run: Run, checkpoint: Path) -> None:
    words = (checkpoint, "--prompt", "abc", "--temperature", 1.0, "--max-new-tokens", 16)
    first, again, other = (json_of(run, *words, "--seed", seed) for seed in (1, 1, 2))
    assert first["completions"] == again["completions"]
    assert first["completions"] != other["completions"]


STATUS = re.compile(
    r"\[4 tokens: prefill 3 tokens in [0-9.e-]+ s, decode [0-9,.]+ tok/s, KV [0-9.]+ KiB, pool unified\]"
)


def test_the_status_line_goes_to_stderr_if_stdout_is_no_terminal(
    run: Run, checkpoint: Path
) -> None:
    words = (checkpoint, "--prompt", "abc", "--max-new-tokens", 4)
    outcome = run("generate", *words)
    assert outcome.status == 0
    assert STATUS.fullmatch(outcome.err.strip())
    (completion,) = json_of(run, *words)["completions"]
    assert outcome.out == completion["text"] + "\n"


def test_the_status_line_is_the_last_one_on_a_terminal(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    outcome = run("generate", checkpoint, "--prompt", "abc", "--max-new-tokens", 4)
    assert STATUS.fullmatch(outcome.out.splitlines()[-1])
    assert outcome.err == ""


def test_prefill_is_no_part_of_the_speed_of_decoding(run: Run, checkpoint: Path) -> None:
    found = json_of(
        run, checkpoint, "--prompt", "abcdefgh", "--max-new-tokens", 5, "--chunk-tokens", 1
    )
    assert found["prefill_tokens"] == 8
    assert found["prefill_seconds"] > 0
    # the prompt's last step gives the first token
    seconds = 4 / found["decode_tokens_per_second"]
    assert found["prefill_seconds"] + seconds <= found["seconds"] + 1e-3
    assert found["tokens_per_second"] == pytest.approx(5 / found["seconds"], rel=0.05)


def test_a_single_token_has_no_speed_of_decoding(run: Run, checkpoint: Path) -> None:
    words = (checkpoint, "--prompt", "a", "--max-new-tokens", 1)
    assert json_of(run, *words)["decode_tokens_per_second"] is None
    err = run("generate", *words).err
    assert err.startswith("[1 token: prefill 1 token in ")
    assert "decode" not in err


def test_prompts_come_from_text_files_and_ids_in_the_order_given(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("äb", encoding="utf-8")
    found = json_of(
        run, checkpoint, "--prompt-ids", "1,2", "--prompt-file", file, "--prompt", "abcd",
        "--max-new-tokens", 1,
    )  # fmt: skip
    assert [c["prompt_tokens"] for c in found["completions"]] == [2, 3, 4]


def test_the_off_values_of_missing_features_are_accepted(run: Run, checkpoint: Path) -> None:
    off = ("--draft", 0, "--graphs", "off", "--prefix-cache", "off")
    json_of(run, checkpoint, "--prompt", "a", "--max-new-tokens", 1, *off)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--prompt", ""), "prompt is empty"),
        (("--prompt-ids", ""), "prompt is empty"),
        ((), "no prompt"),
        (("--prompt-ids", "1,x"), "token ids"),
        (("--prompt-ids", "1,320"), "320"),
        (("--prompt", "abcdefgh", "--max-context", "4"), "max_context is 4"),
        (("--prompt", "abc", "--pool", "unifed"), "'unified'"),
        (("--prompt", "abc", "--device", "tpu"), "tpu"),
        (("--prompt", "abc", "--device", "cuda:77"), f"'cuda:77': torch {torch.__version__} sees "),
        (("--prompt", "abc", "--device", "meta"), "meta"),
        (("--prompt", "abc", "--kernels", "fast"), "torch"),
        (("--prompt", "abc", "--dtype", "int4"), "int4"),
        (("--prompt", "abc", "--row-format", "fp9"), "fp9"),
        (("--prompt", "abc", "--temperature", "-1"), "temperature"),
        (("--prompt", "abc", "--top-p", "0"), "top_p"),
        (("--prompt", "abc", "--max-new-tokens", "0"), "max_new_tokens"),
        (("--prompt", "abc", "--max-requests", "0"), "at least 1"),
        (("--prompt-file", "no-such-file.txt"), "no-such-file.txt"),
        (("--prompt", "abc", "--draft", "2"), "leave it 0"),
        (("--prompt", "abc", "--graphs", "on"), "device graphs are not implemented; leave it off"),
        (("--prompt", "abc", "--prefix-cache", "on"), "leave it off"),
        (("--prompt", "abc", "--prmpt", "d"), "--prmpt"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    run: Run, checkpoint: Path, options: tuple[str, ...], named: str
) -> None:
    assert named in run("generate", checkpoint, *options).error


def test_a_file_that_is_no_text_is_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"abc\xff\xfe")
    assert "byte 3 is no UTF-8" in run("generate", checkpoint, "--prompt-file", file).error


def test_a_missing_folder_is_refused(run: Run, tmp_path: Path) -> None:
    assert "nowhere" in run("generate", tmp_path / "nowhere", "--prompt", "a").error


def test_a_truncated_checkpoint_is_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert weights.name in run("generate", broken, "--prompt", "a").error


def test_a_config_conflict_is_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "conflict"
    shutil.copytree(checkpoint, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    assert "num_hidden_layers" in run("generate", broken, "--prompt", "a").error


@pytest.mark.parametrize("size", [2**40, 2**62])
@pytest.mark.parametrize("key", ["q_lora_rank", "o_lora_rank", "index_n_heads"])
def test_a_config_of_weights_that_no_machine_holds_is_refused(
    run: Run, checkpoint: Path, tmp_path: Path, key: str, size: int
) -> None:
    broken = tmp_path / "huge"
    shutil.copytree(checkpoint, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {key: size}))
    assert "no room for the weights" in run("generate", broken, "--prompt", "a").error


def test_a_config_that_is_no_json_is_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "syntax"
    shutil.copytree(checkpoint, broken)
    (broken / "config.json").write_text("{")
    assert "config.json" in run("generate", broken, "--prompt", "a").error


def test_a_folder_without_config_is_refused(run: Run, tmp_path: Path) -> None:
    assert "config.json" in run("generate", tmp_path, "--prompt", "a").error


def test_text_for_a_checkpoint_without_tokenizer_is_refused(run: Run, golden: Path) -> None:
    assert "--prompt-ids" in run("generate", golden / "tiny", "--prompt", "a").error
