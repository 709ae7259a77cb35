"""The published tensors: their number, sizes and forms, and that a decoder holds exactly these."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.model.decoder import Decoder
from tests.model.published import published_tensors

GOLDENS = ["tiny", "pubrates", "quant/qat"]


@pytest.mark.parametrize(
    ("model", "num_tensors", "nbytes"),
    [("flash", 69_187, 159_609_485_896), ("pro", 145_116, 864_704_792_696)],
)
def test_a_published_model_has_its_published_tensors_and_bytes(
    golden: Path, model: str, num_tensors: int, nbytes: int
) -> None:
    config = ModelConfig.from_json(golden.parent / "configs" / f"{model}.json")
    parts = [part for tensor in published_tensors(config) for part in tensor.parts()]
    assert len({part.name for part in parts}) == len(parts) == num_tensors
    assert sum(part.nbytes for part in parts) == nbytes
    by_layer = Counter(".".join(p.name.split(".")[:2]) for p in parts)
    if model == "flash":  # checkpoint.md: 1564 + compressor 4 + indexer 7 + (bias or tid2eid) 1
        assert [by_layer[f"layers.{i}"] for i in range(4)] == [1565, 1565, 1576, 1569]
        assert by_layer["mtp.0"] == 1575


def test_published_parts_have_the_dtypes_and_shapes_of_the_format(golden: Path) -> None:
    config = ModelConfig.from_json(golden.parent / "configs" / "flash.json")
    parts = {p.name: (p.dtype, p.shape) for t in published_tensors(config) for p in t.parts()}
    assert parts["embed.weight"] == ("BF16", (129_280, 4_096))
    assert parts["layers.2.attn.wq_b.weight"] == ("F8_E4M3", (32_768, 1_024))
    assert parts["layers.2.attn.wq_b.scale"] == ("F8_E8M0", (256, 8))
    assert parts["layers.2.attn.compressor.ape"] == ("F32", (4, 1_024))
    assert parts["layers.3.attn.compressor.wkv.weight"] == ("BF16", (512, 4_096))
    assert parts["layers.2.attn.indexer.compressor.norm.weight"] == ("BF16", (128,))
    assert parts["layers.0.ffn.gate.tid2eid"] == ("I64", (129_280, 6))
    assert parts["layers.5.ffn.experts.255.w2.weight"] == ("I8", (4_096, 1_024))
    assert parts["layers.5.ffn.experts.255.w2.scale"] == ("F8_E8M0", (4_096, 64))
    assert parts["mtp.0.e_proj.scale"] == ("F8_E8M0", (32, 32))
    base = published_tensors(attrs.evolve(config, expert_dtype="fp8"))
    scales = {p.name: (p.dtype, p.shape) for t in base for p in t.parts()}
    assert scales["layers.5.ffn.experts.0.w1.weight"] == ("F8_E4M3", (2_048, 4_096))
    assert scales["layers.5.ffn.experts.0.w1.scale"] == ("F8_E8M0", (16, 32))


@pytest.mark.parametrize(
    "file",
    [
        f"golden/{folder}/{style}.json"
        for folder in GOLDENS
        for style in ("config", "config_official_style")
    ]
    + ["configs/flash.json", "configs/pro.json"],
)
def test_the_decoder_holds_exactly_the_published_tensors(golden: Path, file: str) -> None:
    config = ModelConfig.from_json(golden.parent / file)
    with torch.device("meta"):
        official = Decoder(config).official_tensors()
    held = {name: (tuple(t.view.shape), t.stored) for name, t in official.items()}
    assert held == {t.name: (t.shape, t.stored) for t in published_tensors(config)}
