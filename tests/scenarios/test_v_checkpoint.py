"""Class V: a checkpoint in the published form is consumed tensor by tensor, each exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.model.checkpoint import load_weights
from dsv4.model.checkpoint_writer import save_checkpoint
from dsv4.model.decoder import Decoder
from tests.scenarios.catalogue import scenario
from tests.scenarios.weights import random_decoder, tiny_document, weights_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY written in published names and formats: fp8 with tile scales, packed fp4 experts."""
    path = tmp_path_factory.mktemp("published") / "checkpoint"
    config = ModelConfig.from_json(tiny_document(hidden_size=64))
    save_checkpoint(random_decoder(config, 3), config, path)
    return path


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def load_changed(folder: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> Decoder:
    save_file(tensors, tmp_path / "model.safetensors")
    decoder = Decoder(ModelConfig.from_json(folder / "config.json"))
    load_weights(decoder, tmp_path)
    return decoder


@scenario("V", 79)
def test_a_checkpoint_in_published_naming_loads_whole(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "layers.1.attn.wq_a.scale" in names
    assert "layers.1.ffn.experts.0.w1.scale" in names
    assert stored(folder)["layers.1.ffn.experts.0.w1.weight"].dtype in (torch.int8, torch.uint8)
    assert stored(folder)["layers.1.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    decoder = Decoder(ModelConfig.from_json(folder / "config.json"))
    for tensor in weights_of(decoder).values():
        tensor.copy_(torch.full_like(tensor, -7))
    load_weights(decoder, folder)
    weights = weights_of(decoder)
    assert sorted(weights) == sorted(n for n in names if not n.endswith(".scale"))
    for name, tensor in weights.items():
        assert not (tensor == -7).all(), f"{name} was not filled"


@scenario("V", 79)
def test_a_missing_scale_a_missing_and_a_surplus_tensor_are_named(
    folder: Path, tmp_path: Path
) -> None:
    whole = stored(folder)
    for lost in ("layers.1.attn.wq_a.scale", "layers.2.ffn.experts.3.w2.scale", "norm.weight"):
        rest = {name: tensor for name, tensor in whole.items() if name != lost}
        with pytest.raises(CheckpointError, match=lost.removesuffix(".scale").replace(".", r"\.")):
            load_changed(folder, rest, tmp_path)
    extra = whole | {"layers.7.attn.bias": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"layers\.7\.attn\.bias"):
        load_changed(folder, extra, tmp_path)


@scenario("V", 79)
def test_a_packed_expert_under_an_fp8_header_still_loads_as_fp4(
    folder: Path, tmp_path: Path
) -> None:
    """The config says fp8; what counts is how the tensor is stored."""
    document = json.loads((folder / "config.json").read_text())
    document["expert_dtype"] = "fp8"
    decoder = Decoder(ModelConfig.from_json(document))
    load_weights(decoder, folder)
    again = load_changed(folder, stored(folder), tmp_path)
    for name, tensor in weights_of(decoder).items():
        assert torch.equal(tensor, weights_of(again)[name]), name
