"""ModelConfig in its three file styles, its presets, and the way back to a file."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from dsv4.config import (
    LayerKind,
    ModelConfig,
    YarnConfig,
)
from dsv4.errors import ConfigError
from tests.config.documents import (
    DATA,
    GOLDENS,
    changed,
    golden,
    official,
    published,
    without,
)

SLIDING, CSA, HCA = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA

# What each published key must become: a field of the same name, or one of these.
ELSEWHERE = {
    "compress_ratios", "num_hash_layers", "rope_scaling", "quantization_config",
}  # fmt: skip
WITHOUT_EFFECT = {
    "architectures", "attention_dropout", "initializer_range", "transformers_version", "use_cache",
}  # fmt: skip
ONE_VALUE = {
    "attention_bias": False, "hidden_act": "silu", "model_type": "deepseek_v4", "n_shared_experts": 1,
    "norm_topk_prob": True, "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False, "topk_method": "noaux_tc",
}  # fmt: skip


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_every_key_of_a_published_config_is_accounted_for(name: str) -> None:
    document, model = published(name), ModelConfig.from_json(published(name))
    fields = {field.name for field in attrs.fields(ModelConfig)}
    for key, value in document.items():
        if key in fields:
            assert getattr(model, key) == value, key
        elif key in ONE_VALUE:
            assert value == ONE_VALUE[key], key
        else:
            assert key in ELSEWHERE | WITHOUT_EFFECT, key
    assert [layer.ratio for layer in model.layers] == document["compress_ratios"]
    assert sum(layer.hash_routing for layer in model.layers) == document["num_hash_layers"]
    assert {"type": "yarn"} | attrs.asdict(model.yarn) == document["rope_scaling"]
    assert model.kv_quant == "official"


@pytest.mark.parametrize(
    ("name", "num_csa", "num_hca", "num_sliding"), [("flash", 21, 20, 2), ("pro", 30, 31, 0)]
)
def test_the_published_layer_tables_have_the_counts_of_the_specification(
    name: str, num_csa: int, num_hca: int, num_sliding: int
) -> None:
    model = ModelConfig.from_json(DATA / "configs" / f"{name}.json")
    kinds = [layer.kind for layer in model.main_layers]
    assert [kinds.count(kind) for kind in (CSA, HCA, SLIDING)] == [num_csa, num_hca, num_sliding]
    assert model.ratios == (4, 128)
    for index, layer in enumerate(model.layers):
        compressing = layer.ratio > 0
        assert layer.rope_theta == (160_000 if compressing else 10_000)
        assert (layer.yarn is not None) == compressing
        assert layer.index_topk == (model.index_topk if layer.ratio == 4 else 0)
        assert layer.hash_routing == (index < 3)
        assert (layer.entry_source, layer.index_source) == (index, index)


def test_the_draft_layer_of_pro_has_its_own_row_and_not_that_of_layer_1() -> None:
    (draft,) = ModelConfig.from_json(published("pro")).draft_layers
    assert draft.is_draft
    assert (draft.kind, draft.ratio, draft.rope_theta, draft.hash_routing) == (
        SLIDING,
        0,
        1e4,
        False,
    )


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_a_preset_equals_the_published_config(name: str) -> None:
    assert ModelConfig.preset(name) == ModelConfig.from_json(published(name))


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_a_published_config_is_written_back_key_by_key(name: str) -> None:
    document = published(name)
    kept = {key: value for key, value in document.items() if key not in WITHOUT_EFFECT}
    written = ModelConfig.from_json(document).to_json()
    written.pop("architectures")
    assert json.loads(json.dumps(written)) == kept


def test_the_tiny_preset_is_a_five_layer_byte_model() -> None:
    model = ModelConfig.preset("tiny")
    assert [layer.ratio for layer in model.layers] == [0, 4, 32, 4, 32, 0]
    assert (model.tokenizer, model.kv_quant) == ("byte", "official")
    assert (model.nope_head_dim, model.vocab_size % 64) == (64, 0)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'flsh'.*nearest known name: 'flash'"):
        ModelConfig.preset("flsh")


@pytest.mark.parametrize("name", GOLDENS)
def test_the_two_styles_of_a_golden_config_describe_one_model(name: str) -> None:
    typed = ModelConfig.from_json(DATA / "golden" / name)
    official = ModelConfig.from_json(DATA / "golden" / name / "config_official_style.json")
    assert typed == official.without_drafts()
    assert (len(typed.draft_layers), len(official.draft_layers)) == (0, 1)


def test_golden_tiny_is_read_as_its_hand_written_table() -> None:
    model = ModelConfig.from_json(golden("tiny"))
    rows = [
        (layer.kind, layer.ratio, layer.index_topk, layer.hash_routing) for layer in model.layers
    ]
    assert rows == [
        (SLIDING, 0, 0, True),
        (CSA, 4, 3, True),
        (HCA, 16, 0, False),
        (CSA, 4, 3, False),
        (HCA, 16, 0, False),
    ]
    assert model.yarn == YarnConfig(
        factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
    )
    assert (model.nope_head_dim, model.softmax_scale) == (48, 0.125)
    assert (model.kv_quant, model.torch_dtype) == ("none", "float32")


@pytest.mark.parametrize(
    "document",
    [published("flash"), published("pro"), ModelConfig.preset("tiny").to_json()]
    + [
        golden(name, style)
        for name in GOLDENS
        for style in ("config.json", "config_official_style.json")
    ],
)
def test_a_written_config_reads_back_equal(document: dict[str, Any]) -> None:
    model = ModelConfig.from_json(document)
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_a_csa_layer_of_another_ratio_is_written_with_layer_types() -> None:
    document = changed(
        golden("tiny"),
        compress_rates={"compressed_sparse_attention": 6, "heavily_compressed_attention": 4},
        num_nextn_predict_layers=1,
    )
    model = ModelConfig.from_json(document)
    assert [(layer.kind, layer.ratio) for layer in model.layers[1:]] == [
        (CSA, 6), (HCA, 4), (CSA, 6), (HCA, 4), (SLIDING, 0),
    ]  # fmt: skip
    written = model.to_json()
    assert written["layer_types"] == document["layer_types"]
    assert "compress_ratios" not in written
    assert ModelConfig.from_json(written) == model


def test_a_layer_table_that_no_style_expresses_is_not_written() -> None:
    model = ModelConfig.preset("tiny")
    layers = list(model.layers)
    layers[3] = attrs.evolve(layers[3], index_source=1)
    with pytest.raises(ConfigError, match=r"no config.json style can express"):
        attrs.evolve(model, layers=layers).to_json()


def test_three_trailing_zeros_are_three_draft_layers() -> None:
    document = published("flash")
    document["compress_ratios"] += [0, 0]
    model = ModelConfig.from_json(document)
    assert model.num_nextn_predict_layers == len(model.draft_layers) == 3
    assert model.without_drafts().layers == ModelConfig.preset("flash").main_layers


def test_an_explicit_zero_drops_the_draft_layers() -> None:
    model = ModelConfig.from_json(changed(published(), num_nextn_predict_layers=0))
    assert model == ModelConfig.preset("flash").without_drafts()


def test_official_fp8_weights_run_in_bf16_with_official_kv_rounding() -> None:
    document = without(official("tiny"), "kv_quant") | {"dtype": "fp8", "scale_fmt": "ue8m0"}
    model = ModelConfig.from_json(document | {"expert_dtype": "fp4"})
    assert (model.torch_dtype, model.kv_quant, model.expert_dtype) == (
        "bfloat16",
        "official",
        "fp4",
    )


def test_a_ratio_list_decides_by_value_that_only_4_is_csa() -> None:
    document = changed(official("pubrates"), compress_ratios=[1, 4, 96, 2])
    kinds = [layer.kind for layer in ModelConfig.from_json(document).layers]
    assert kinds == [HCA, CSA, HCA, HCA]


def test_a_saved_transformers_config_is_the_published_model() -> None:
    # The keys that transformers 5.23 writes for Flash, beside the renamed ones: written down, not imported.
    document = published("flash")
    ratios, scaling = document.pop("compress_ratios"), document.pop("rope_scaling")
    names = {
        0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention",
    }  # fmt: skip
    document |= {
        "dtype": document.pop("torch_dtype"),
        "layer_types": [names[ratio] for ratio in ratios[:43]],
        "compress_rates": {names[4]: 4, names[128]: 128},
        "mlp_layer_types": ["hash_moe"] * document.pop("num_hash_layers") + ["moe"] * 40,
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": scaling
            | {"rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0},
        },
        "mlp_bias": False, "pad_token_id": None, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "_name_or_path": "",
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": None,
    }  # fmt: skip
    document["quantization_config"]["expert_dtype"] = document["expert_dtype"]
    assert ModelConfig.from_json(document) == ModelConfig.preset("flash")


def test_official_arguments_say_yarn_off_by_a_length_of_zero() -> None:
    document = changed(official("tiny"), original_seq_len=0)
    with pytest.raises(ConfigError, match="missing key 'max_position_embeddings'"):
        ModelConfig.from_json(document)
    model = ModelConfig.from_json(document | {"max_position_embeddings": 4096})
    assert model.yarn is None
    assert all(layer.yarn is None for layer in model.layers)


def test_kv_quant_is_the_key_else_follows_the_weights() -> None:
    flash = published("flash")
    assert ModelConfig.from_json(flash).kv_quant == "official"
    assert ModelConfig.from_json(changed(flash, kv_quant="none")).kv_quant == "none"
    del flash["quantization_config"]
    assert ModelConfig.from_json(flash).kv_quant == "none"


def test_a_swiglu_limit_of_zero_is_kept() -> None:
    assert ModelConfig.from_json(changed(published(), swiglu_limit=0)).swiglu_limit == 0.0


def test_token_ids_may_be_null_or_a_list_of_one() -> None:
    model = ModelConfig.from_json(changed(published(), bos_token_id=None, eos_token_id=[7]))
    assert (model.bos_token_id, model.eos_token_id) == (None, 7)
