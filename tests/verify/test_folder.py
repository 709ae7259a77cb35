"""The golden folders, whole, on both pools; and that a verification can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.verify import VerifyOptions, verify

PROMPTS = {"tiny": 4, "pubrates": 3, "quant": 2}


@pytest.mark.parametrize("pool", ["unified", "three-pool"])
@pytest.mark.parametrize("folder", list(PROMPTS))
def test_every_stored_tensor_of_a_golden_folder_is_within_its_limit(
    golden: Path, folder: str, pool: str
) -> None:
    report = verify(golden / folder, VerifyOptions(pools=(pool,)))
    failures = [(c.subject, c.name, c.max_error, c.note) for c in report.failures]
    assert failures == []
    compared = {(c.subject, c.name) for c in report.checks}
    assert len({s for s, _ in compared if s.startswith("prompt")}) == PROMPTS[folder]
    assert len({n for _, n in compared if n.startswith("chunked.random")}) == 10
    assert {"decode.logits", "greedy.ids", "chunked.logits"} <= {name for _, name in compared}


def test_every_result_in_the_files_is_compared(golden: Path) -> None:
    """Whatever a file stores is an input, or has a check of its name."""
    inputs = {"input_ids", "decode.prefill_len", "chunked.sizes", "mtp.ids_next"}
    report = verify(golden / "tiny", VerifyOptions(pools=("unified",), chunkings=0))
    compared = {(check.subject, check.name) for check in report.checks}
    for file in (golden / "tiny").glob("*.safetensors"):
        if file.stem == "weights":
            continue
        stored = {n for n in load_file(file) if not n.startswith("mtp.0.")} - inputs
        assert {(file.stem, name) for name in stored} <= compared


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "weights.safetensors", "prompt1_len37.safetensors"):
        shutil.copy(golden / "tiny" / name, tmp_path)
    return tmp_path


FAST = VerifyOptions(pools=("unified",), chunkings=0)


@pytest.mark.parametrize(
    ("name", "index", "step"),
    [
        ("prefill.streams.2", (0, 3, 1, 5), 4e-3),
        ("prefill.attn_in.0", (0, 36, 1), 1e-3),
        ("prefill.attn_out.4", (0, 20, 9), 1e-4),
        ("prefill.attn_hc_comb.1", (0, 7, 3, 2), 3e-4),
        ("prefill.compressed_kv.3", (0, 8, 63), 2e-3),
        ("prefill.index_topk.1", (0, 36, 2), 1),
        ("prefill.route_indices.2", (5, 1), 1),
        ("prefill.route_weights.2", (5, 1), 1e-3),
        ("prefill.final_norm", (0, 0, 0), 1e-3),
        ("decode.logits", (0, 27, 95), 1e-4),
        ("greedy.ids", (0, 7), 1),
    ],
)
def test_a_value_that_is_off_is_found(
    folder: Path, name: str, index: tuple[int, ...], step: float
) -> None:
    file = folder / "prompt1_len37.safetensors"
    tensors = load_file(file)
    tensors[name][index] += step
    save_file(tensors, file)
    failures = {check.name for check in verify(folder, FAST).failures}
    # experts are compared as sets, so weights are ordered by the stored experts
    assert name in failures
    assert failures <= {name, name.replace("route_indices", "route_weights")}


def test_a_nan_a_wrong_shape_and_an_unknown_tensor_are_failures(folder: Path) -> None:
    file = folder / "prompt1_len37.safetensors"
    tensors = load_file(file)
    tensors["prefill.attn_in.2"][0, 0, 0] = torch.nan
    tensors["prefill.attn_in.3"] = tensors["prefill.attn_in.3"][:, :, :-1].contiguous()
    tensors["prefill.new_tensor.0"] = torch.zeros(1)
    save_file(tensors, file)
    failures = {check.name: check for check in verify(folder, FAST).failures}
    assert set(failures) == {"prefill.attn_in.2", "prefill.attn_in.3", "prefill.new_tensor.0"}
    assert failures["prefill.attn_in.2"].max_error == float("inf")


def test_a_wrong_weight_is_found(folder: Path) -> None:
    file = folder / "weights.safetensors"
    weights = load_file(file)
    sinks = next(name for name in weights if name.endswith("3.self_attn.sinks"))
    weights[sinks][1] += 0.01
    save_file(weights, file)
    failures = {check.name for check in verify(folder, FAST).failures}
    assert "prefill.attn_out.3" in failures
    assert "prefill.attn_out.2" not in failures
