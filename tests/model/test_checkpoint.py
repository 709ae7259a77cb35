"""Checkpoints: names and number formats; every tensor used once or one error that lists all."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.model.checkpoint import has_drafts, load_tensors, load_weights, save_checkpoint
from dsv4.model.decoder import Decoder
from dsv4.model.official import OfficialTensor
from dsv4.model.tensor_names import official_name
from tests.model.published import published_tensors

GOLDENS = ["tiny", "pubrates", "quant/qat"]
FP4_VALUES = [
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
]


class Holder:
    """A stand-in decoder: zeroed views of given shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.views = {
            name.replace("__", "."): OfficialTensor(
                torch.zeros(shape, dtype=torch.int64 if "tid2eid" in name else torch.float32),
                "i64" if "tid2eid" in name else "bf16",
            )
            for name, shape in shapes.items()
        }

    def official_tensors(self) -> dict[str, OfficialTensor]:
        return self.views

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name].view


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiny_config(golden: Path, *, drafts: int = 0) -> ModelConfig:
    config = ModelConfig.from_json(golden / "tiny" / "config_official_style.json")
    return config if drafts else config.without_drafts()


def fill_with_published_values(decoder: Decoder) -> None:
    """Values that the published dtypes hold exactly, different in every tensor."""
    for i, tensor in enumerate(decoder.official_tensors().values()):
        gen = torch.Generator().manual_seed(i)
        shape = tensor.view.shape
        if tensor.stored == "i64":
            value = torch.randint(0, 2, shape, generator=gen)
        elif tensor.stored == "fp8":
            codes = torch.randint(0, 127, shape, generator=gen, dtype=torch.uint8)
            value = codes.view(torch.float8_e4m3fn).float() * 2.0 ** (i % 9 - 12)
        elif tensor.stored == "fp4":
            codes = torch.randint(0, 16, shape, generator=gen)
            value = torch.tensor(FP4_VALUES)[codes] * 2.0 ** (i % 7 - 6)
        else:
            value = torch.randn(shape, generator=gen)
            value = value.bfloat16() if tensor.stored == "bf16" else value
        tensor.view.copy_(value)


def saved_tiny(golden: Path, folder: Path, **options: int) -> tuple[Decoder, ModelConfig]:
    config = tiny_config(golden, drafts=1)
    decoder = Decoder(config)
    fill_with_published_values(decoder)
    save_checkpoint(decoder, config, folder, **options)
    return decoder, config


def differing(a: Decoder, b: Decoder) -> list[str]:
    other = b.official_tensors()
    return [n for n, t in a.official_tensors().items() if not torch.equal(t.view, other[n].view)]


# Names.


@pytest.mark.parametrize("folder", GOLDENS)
def test_transformers_names_reach_the_tensors_of_the_name_map(golden: Path, folder: str) -> None:
    name_map = json.loads((golden / folder / "name_map.json").read_text())
    stored = load_file(golden / folder / "weights.safetensors")
    decoder = Decoder(ModelConfig.from_json(golden / folder / "config.json"))
    load_weights(decoder, golden / folder / "weights.safetensors")
    official = decoder.official_tensors()
    wanted: dict[str, Tensor] = {}
    for name, target in name_map.items():
        if isinstance(target, str):
            assert official_name(name) == target
            wanted[target] = stored[name]
            continue
        for e in range(stored[name].shape[0]):
            rows = stored[name][e].chunk(len(target))  # w1 above w3, as the map says
            for text, value in zip(target, rows, strict=True):
                wanted[text.split(" ")[0].format(e=e)] = value
    assert wanted.keys() == official.keys()
    assert [n for n, t in official.items() if not torch.equal(t.view, wanted[n])] == []


@pytest.mark.parametrize("prefix", ["", "model."])
def test_official_names_load_with_and_without_prefix(golden: Path, prefix: str) -> None:
    config = tiny_config(golden)
    decoder, again = Decoder(config), Decoder(config)
    load_weights(decoder, golden / "tiny" / "weights.safetensors")
    tensors = {prefix + name: t.view for name, t in decoder.official_tensors().items()}
    load_tensors(again, tensors)
    assert differing(decoder, again) == []


def test_draft_weights_load_under_transformers_style_names(golden: Path) -> None:
    stored = load_file(golden / "tiny" / "weights.safetensors")
    drafts = load_file(golden / "tiny" / "mtp.safetensors")
    stored |= {name: t for name, t in drafts.items() if name.startswith("mtp.0.")}
    decoder = Decoder(tiny_config(golden, drafts=1))
    load_tensors(decoder, stored)
    official = decoder.official_tensors()
    for name, source in [
        ("mtp.0.e_proj.weight", "mtp.0.e_proj.weight"),
        ("mtp.0.hc_head_scale", "mtp.0.hc_head.hc_scale"),
        ("mtp.0.attn.wkv.weight", "mtp.0.self_attn.kv_proj.weight"),
        ("mtp.0.ffn.gate.bias", "mtp.0.mlp.gate.e_score_correction_bias"),
    ]:
        assert torch.equal(official[name].view, drafts[source])


def test_draft_weights_of_a_model_without_drafts_are_surplus_unless_ignored(golden: Path) -> None:
    stored = load_file(golden / "tiny" / "weights.safetensors")
    stored["mtp.0.e_proj.weight"] = torch.zeros(64, 64)
    decoder = Decoder(tiny_config(golden))
    with pytest.raises(CheckpointError, match=r"surplus \(1\): mtp\.0\.e_proj\.weight"):
        load_tensors(decoder, stored)
    load_tensors(decoder, stored, ignore_drafts=True)


def test_a_checkpoint_tells_whether_it_holds_drafts(golden: Path) -> None:
    assert has_drafts(golden / "tiny" / "mtp.safetensors")
    assert not has_drafts(golden / "tiny" / "weights.safetensors")


def test_unfused_transformers_experts_load_too() -> None:
    holder = Holder(
        layers__0__ffn__experts__0__w1__weight=(4, 6),
        layers__0__ffn__experts__0__w2__weight=(6, 4),
        layers__0__ffn__experts__0__w3__weight=(4, 6),
    )
    stem = "model.layers.0.mlp.experts.0."
    tensors = {f"{stem}{n}_proj.weight": randn(4, 6, seed=i) for i, n in enumerate(("gate", "up"))}
    tensors[f"{stem}down_proj.weight"] = randn(6, 4, seed=9)
    load_tensors(holder, tensors)
    for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        got = holder[f"layers.0.ffn.experts.0.{part}.weight"]
        assert torch.equal(got, tensors[f"{stem}{name}_proj.weight"])


# Number formats, against element-by-element arithmetic.


def brute_tiles(codes: Tensor, scale: Tensor) -> Tensor:
    value = codes.float()
    for o in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            value[o, i] *= scale[o // 128, i // 128]
    return value


@pytest.mark.parametrize("suffix", ["scale", "weight_scale_inv"])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_weights_load_with_any_scale_and_ragged_tiles(
    suffix: str, scale_dtype: torch.dtype
) -> None:
    holder = Holder(layers__0__attn__wkv__weight=(130, 131))
    codes = randn(130, 131).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 8.0], [2.0**-20, 1.0]])
    if scale_dtype == torch.float32:
        scale *= 1.5  # fp32 scales need not be powers of two
    stored = {
        "layers.0.attn.wkv.weight": codes,
        f"layers.0.attn.wkv.{suffix}": scale.to(scale_dtype),
    }
    load_tensors(holder, stored)
    assert torch.equal(holder["layers.0.attn.wkv.weight"], brute_tiles(codes, scale))


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_packed_fp4_weights_load_low_nibble_first(scale_dtype: torch.dtype) -> None:
    holder = Holder(layers__0__ffn__experts__0__w1__weight=(3, 64))
    packed = torch.arange(96, dtype=torch.uint8).view(3, 32) * 37
    scale = torch.tensor([[1.0, 2.0], [0.5, 4.0], [2.0**-30, 1.0]])
    stem = "layers.0.ffn.experts.0.w1."
    load_tensors(
        holder, {stem + "weight": packed.view(torch.int8), stem + "scale": scale.to(scale_dtype)}
    )
    for o in range(3):
        for i in range(64):
            byte = int(packed[o, i // 2])
            wanted = FP4_VALUES[byte >> 4 if i % 2 else byte & 15] * float(scale[o, i // 32])
            assert float(holder[stem + "weight"][o, i]) == wanted


@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "gate_up_proj.weight_scale_inv"])
def test_fused_fp8_experts_are_dequantised_before_they_are_split(name: str) -> None:
    stem = "layers.0.ffn.experts."
    holder = Holder(
        **{
            f"{stem}{e}.{w}.weight".replace(".", "__"): (96, 40)
            for e in (0, 1)
            for w in ("w1", "w3")
        }
    )
    codes = randn(2, 192, 40).to(torch.float8_e4m3fn)
    scale = torch.tensor([[[1.0], [4.0]], [[0.25], [16.0]]])  # the tile border lies inside w3
    fused = "model.layers.0.mlp.experts."
    load_tensors(
        holder, {fused + "gate_up_proj": codes, fused + name: scale.to(torch.float8_e8m0fnu)}
    )
    for e in (0, 1):
        both = brute_tiles(codes[e], scale[e])
        assert torch.equal(holder[f"{stem}{e}.w1.weight"], both[:96])
        assert torch.equal(holder[f"{stem}{e}.w3.weight"], both[96:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_floats_load_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    holder = Holder(norm__weight=(7,), layers__0__ffn__gate__tid2eid=(5, 2))
    values, table = randn(7).to(dtype), torch.arange(10).view(5, 2)
    file = tmp_path / "any name.safetensors"
    save_file({"norm.weight": values, "layers.0.ffn.gate.tid2eid": table}, file)
    load_weights(holder, tmp_path)
    file.unlink()
    assert torch.equal(holder["norm.weight"], values.float())
    assert torch.equal(holder["layers.0.ffn.gate.tid2eid"], table)


# What does not fit.


def test_all_problems_are_listed_in_one_error_and_nothing_is_loaded() -> None:
    holder = Holder(
        embed__weight=(4, 6),
        norm__weight=(6,),
        head__weight=(4, 6),
        layers__0__attn__wkv__weight=(130, 64),
        layers__0__attn__wq_a__weight=(130, 64),
        layers__0__attn__wo_b__weight=(130, 64),
        layers__0__attn__wo_a__weight=(8, 6),
        layers__0__ffn__gate__tid2eid=(5, 2),
    )
    fp8, e8m0 = torch.zeros(130, 64).to(torch.float8_e4m3fn), torch.float8_e8m0fnu
    tensors = {
        "embed.weight": torch.ones(4, 6),
        "model.embed_tokens.weight": torch.ones(4, 6),
        "norm.weight": torch.ones(7),
        "layers.0.attn.wkv.weight": fp8,
        "layers.0.attn.wq_a.weight": fp8,
        "layers.0.attn.wq_a.scale": torch.ones(1, 2).to(e8m0),
        "layers.0.attn.wo_b.weight": fp8,
        "layers.0.attn.wo_b.scale": torch.ones(2, 1, dtype=torch.float16),
        "layers.0.attn.wo_a.weight": torch.ones(8, 6),
        "layers.0.attn.wo_a.scale": torch.ones(1, 1).to(e8m0),
        "layers.0.ffn.gate.tid2eid": torch.ones(5, 2),
        "rotary.inv_freq": torch.ones(3),
    }
    with pytest.raises(CheckpointError) as caught:
        load_tensors(holder, tensors)
    message = str(caught.value)
    assert "\n" not in message
    for text in (
        "given twice (1): embed.weight and model.embed_tokens.weight",
        "missing (1): head.weight",
        "surplus (2): layers.0.attn.wo_a.scale, rotary.inv_freq",
        "missing scale (1): layers.0.attn.wkv.weight",
        "layers.0.attn.wq_a.scale [1, 2] instead of [2, 1]",
        "norm.weight [7] instead of [6]",
        "layers.0.attn.wo_b.scale torch.float16",
        "layers.0.ffn.gate.tid2eid torch.float32",
    ):
        assert text in message
    assert all(not tensor.view.any() for tensor in holder.views.values())


def test_experts_given_fused_and_one_by_one_are_given_twice() -> None:
    holder = Holder(layers__0__ffn__experts__0__w2__weight=(6, 4))
    tensors = {
        "layers.0.ffn.experts.0.w2.weight": torch.ones(6, 4),
        "model.layers.0.mlp.experts.down_proj": torch.ones(1, 6, 4),
    }
    with pytest.raises(CheckpointError, match=r"given twice \(1\): layers\.0\.ffn\.experts\.0\.w2"):
        load_tensors(holder, tensors)


def test_another_number_of_experts_is_a_wrong_shape() -> None:
    holder = Holder(layers__0__ffn__experts__0__w2__weight=(6, 4))
    with pytest.raises(
        CheckpointError, match=re.escape("down_proj [2, 6, 4] instead of [1, 6, 4]")
    ):
        load_tensors(holder, {"layers.0.mlp.experts.down_proj": torch.ones(2, 6, 4)})


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_a_truncated_file_is_named_in_one_line(golden: Path, tmp_path: Path, keep: int) -> None:
    whole = (golden / "tiny" / "weights.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    decoder = Decoder(tiny_config(golden))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole") as caught:
        load_weights(decoder, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_and_no_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        load_weights(Holder(), tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_weights(Holder(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "not an index"),
        ('{"metadata": {}}', "not an index"),
        ('{"weight_map": ["a"]}', "not an index"),
        ('{"weight_map": {"norm.weight": "../a.safetensors"}}', "beside the index"),
        ('{"weight_map": {"norm.weight": "b.safetensors"}}', "no such file"),
        (
            '{"weight_map": {"norm.weight": "a.safetensors", "x": "a.safetensors"}}',
            r"not in the file it names: x \(a\.safetensors\)",
        ),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, index: str, reason: str) -> None:
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=reason):
        load_weights(Holder(norm__weight=(3,)), tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"norm.weight": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"in a\.safetensors and in b\.safetensors"):
        load_weights(Holder(norm__weight=(3,)), tmp_path)


def test_loading_is_silent_without_a_terminal(
    golden: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_weights(Decoder(tiny_config(golden)), golden / "tiny" / "weights.safetensors")
    assert capfd.readouterr() == ("", "")


# Writing.


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 20_000}, {"shard_bytes": 1}])
def test_published_values_survive_a_round_trip_exactly(
    golden: Path, tmp_path: Path, options: dict[str, int]
) -> None:
    decoder, config = saved_tiny(golden, tmp_path / "made", **options)
    read = ModelConfig.from_json(tmp_path / "made")
    assert read == config
    again = Decoder(read)
    load_weights(again, tmp_path / "made")
    assert differing(decoder, again) == []


def test_the_files_are_in_the_published_format(golden: Path, tmp_path: Path) -> None:
    _, config = saved_tiny(golden, tmp_path / "made", shard_bytes=50_000)
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    files = sorted(path.name for path in (tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    for file in files:
        with safe_open(tmp_path / "made" / file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  # no mapping
                part = handle.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
                assert index["weight_map"][name] == file
    parts = [part for tensor in published_tensors(config) for part in tensor.parts()]
    assert found == {part.name: (part.dtype, part.shape) for part in parts}
    assert index["metadata"]["total_size"] == sum(part.nbytes for part in parts)
    assert index["weight_map"].keys() == found.keys()
    assert found["layers.0.attn.wq_b.weight"] == ("F8_E4M3", (256, 32))
    assert found["layers.0.attn.wq_b.scale"] == ("F8_E8M0", (2, 1))
    assert found["layers.0.ffn.experts.7.w1.weight"] == ("I8", (16, 32))
    assert found["layers.0.ffn.experts.7.w1.scale"] == ("F8_E8M0", (16, 2))


def test_one_file_needs_no_index(golden: Path, tmp_path: Path) -> None:
    saved_tiny(golden, tmp_path / "made")
    assert sorted(os.listdir(tmp_path / "made")) == ["config.json", "model.safetensors"]


def test_a_scale_that_no_longer_matches_shows(golden: Path, tmp_path: Path) -> None:
    decoder, config = saved_tiny(golden, tmp_path / "made")
    file = tmp_path / "made" / "model.safetensors"
    stored = load_file(file)
    name = "layers.1.attn.wkv.scale"
    stored[name] = (stored[name].float() * 2).to(torch.float8_e8m0fnu)
    save_file(stored, file)
    again = Decoder(config)
    load_weights(again, tmp_path / "made")
    assert differing(decoder, again) == ["layers.1.attn.wkv.weight"]


def test_a_failing_save_leaves_nothing_behind(golden: Path, tmp_path: Path) -> None:
    config = tiny_config(golden)
    decoder = Decoder(config)
    decoder.official_tensors()["layers.4.ffn.shared_experts.w3.weight"].view[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.4\.ffn\.shared_experts\.w3\.weight: holds"):
        save_checkpoint(decoder, config, tmp_path / "made", shard_bytes=10_000)
    assert os.listdir(tmp_path) == []


def test_a_folder_with_content_is_never_overwritten(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    saved_tiny(golden, tmp_path / "made")
    before = (tmp_path / "made" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match="exists already"):
        saved_tiny(golden, tmp_path / "made")
    assert (tmp_path / "made" / "model.safetensors").stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / "made")
    assert os.listdir(tmp_path) == []
