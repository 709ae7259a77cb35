"""dsv4 verify: exit status and report; what is compared is tested with dsv4.verify itself."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Run

SMALL = ("--pool", "unified", "--chunkings", "1")


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """golden/tiny with its shortest prompt alone."""
    for name in ("config.json", "weights.safetensors", "prompt0_len5.safetensors"):
        shutil.copy(golden / "tiny" / name, tmp_path)
    return tmp_path


def test_a_right_folder_is_status_0_with_a_line_per_tensor(run: Run, folder: Path) -> None:
    outcome = run("verify", folder, *SMALL)
    assert outcome.status == 0, outcome.out
    assert "prefill.attn_out.4" in outcome.out
    stored = load_file(folder / "prompt0_len5.safetensors")
    # three of them are inputs; chunks of the stored and of one random size are checks of their own
    assert f"all {len(stored) - 3 + 2} checks ok" in outcome.out


def test_json_lists_every_check(run: Run, folder: Path) -> None:
    found = json.loads(run("verify", folder, *SMALL, "--json").out)
    assert found["ok"]
    assert found["num_checks"] == len(found["tensors"])
    assert all(row["ok"] and row["pool"] == "unified" for row in found["tensors"])


def test_one_wrong_value_is_status_1_and_named(run: Run, folder: Path) -> None:
    file = folder / "prompt0_len5.safetensors"
    tensors = load_file(file)
    tensors["prefill.ffn_out.3"][0, 4, 7] += 1e-4
    save_file(tensors, file)
    outcome = run("verify", folder, *SMALL)
    assert outcome.status == 1
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("FAILED")]
    assert "prefill.ffn_out.3" in line
    found = json.loads(run("verify", folder, *SMALL, "--json").out)
    assert [row["tensor"] for row in found["tensors"] if not row["ok"]] == ["prefill.ffn_out.3"]


def test_bf16_rows_of_an_fp32_model_are_over_the_limits_and_warned_of(
    run: Run, folder: Path
) -> None:
    outcome = run("verify", folder, *SMALL, "--row-format", "bf16")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert "--row-format bf16: the limits are for fp32 rows" in outcome.err
    lines = outcome.out.splitlines()
    failed = int(lines[-1].split()[0])
    assert failed > 10
    assert len([line for line in lines if line.startswith("FAILED")]) == 10
    assert lines[-2] == f"and {failed - 10} more"
    assert max(map(float, re.findall(r"([0-9.]+)%", outcome.out))) <= 1000


def test_fp32_rows_give_no_warning(run: Run, folder: Path) -> None:
    assert run("verify", folder, *SMALL, "--row-format", "fp32").err == ""


def test_wrong_integers_are_counted_and_values_that_are_no_numbers_named(
    run: Run, folder: Path
) -> None:
    file = folder / "prompt0_len5.safetensors"
    tensors = load_file(file)
    tensors["prefill.route_indices.3"] += 100
    num_wrong = tensors["prefill.route_indices.3"].numel()
    tensors["prefill.ffn_out.3"][0, 4, 7] = float("nan")
    tensors["prefill.ffn_out.2"][0, 4, 7] = 1e6
    save_file(tensors, file)
    outcome = run("verify", folder, *SMALL)
    assert outcome.status == 1
    lines = [line for line in outcome.out.splitlines() if line.startswith("FAILED")]
    assert any(line.endswith(f"prefill.route_indices.3: {num_wrong} differ") for line in lines)
    assert any(line.endswith("prefill.ffn_out.3: not finite") for line in lines)
    assert any("prefill.ffn_out.2: error 1.00e+06, limit " in line for line in lines)
    assert "inf" not in outcome.out


def test_number_formats_alone_are_a_golden_folder(run: Run, golden: Path, tmp_path: Path) -> None:
    shutil.copy(golden / "quant" / "primitives.safetensors", tmp_path)
    outcome = run("verify", tmp_path)
    assert outcome.status == 0
    assert "all 17 checks ok" in outcome.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nowhere",), "nowhere"),
        ((".",), "no golden data"),
        (("FOLDER", "--pool", "one"), "'one'"),
        (("FOLDER", "--kernels", "one"), "'one'"),
        (("FOLDER", "--row-format", "one"), "'one'"),
        (("FOLDER", "--dtype", "one"), "'one'"),
        (("FOLDER", "--device", "cuda:77"), "cuda:77"),
        (("FOLDER", "--chunkings", "x"), "--chunkings"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    run: Run, folder: Path, tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"FOLDER": folder, ".": tmp_path / "empty"}
    assert named in run("verify", *(places.get(word, word) for word in words)).error


def test_a_truncated_file_is_one_line(run: Run, folder: Path) -> None:
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "weights.safetensors" in run("verify", folder).error


def test_a_missing_tensor_is_one_line(run: Run, folder: Path) -> None:
    file = folder / "prompt0_len5.safetensors"
    tensors = load_file(file)
    del tensors["decode.prefill_len"]
    save_file(tensors, file)
    assert "decode.prefill_len" in run("verify", folder, *SMALL).error
