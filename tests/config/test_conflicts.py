"""Every conflict of a model config raises one line: name, value, limit, remedy."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import attrs
import pytest

from dsv4.config import (
    LayerConfig,
    LayerKind,
    ModelConfig,
)
from dsv4.errors import ConfigError
from tests.config.documents import (
    changed,
    golden,
    nested,
    official,
    published,
    without,
)

SLIDING, CSA, HCA = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA


FLASH, TINY, OFFICIAL = published(), golden("tiny"), official("tiny")
CONFLICTS = {
    "table too short": (changed(FLASH, compress_ratios=[0] * 43), r"compress_ratios has 43 entries.*need 44"),
    "table shorter than the layers": (
        changed(OFFICIAL, compress_ratios=[0, 4]),
        r"compress_ratios has 2 entries: num_hidden_layers 5 .*complete the table",
    ),
    "layer_types too short": (changed(TINY, layer_types=["sliding_attention"]), "layer_types has 1 entries"),
    "mlp_layer_types too short": (changed(TINY, mlp_layer_types=["moe"]), "mlp_layer_types has 1 entries"),
    "two compress thetas": (
        nested(TINY, "rope_parameters", "compress", "rope_theta", value=10000.0),
        r"compress_rope_theta 160000.0 conflicts with rope_parameters.compress.rope_theta 10000.0; make",
    ),
    "two thetas": (
        nested(TINY, "rope_parameters", "main", "rope_theta", value=500.0),
        r"rope_theta 10000.0 conflicts with rope_parameters.main.rope_theta 500.0",
    ),
    "two rope dims": (changed(TINY, partial_rotary_factor=0.5), "partial_rotary_factor 0.5 conflicts"),
    "rope dim against the fraction": (
        changed(TINY, qk_rope_head_dim=32),
        r"qk_rope_head_dim 32 conflicts with partial_rotary_factor 0.25 of head_dim 64, which is 16",
    ),
    "two names of one fact": (changed(FLASH, dim=1), r"hidden_size 4096 conflicts with dim 1"),
    "two layer tables": (
        changed(TINY, compress_ratios=[0, 4, 128, 4, 128]),
        r"compress_ratios \[0, 4, 128, 4, 128\] conflicts with layer_types",
    ),
    "two hash tables": (changed(TINY, num_hash_layers=3), r"num_hash_layers 3 conflicts.*\[0, 1\]"),
    "unknown key": (
        changed(FLASH, slidng_window=128, hc_mul=4),
        r"unknown key 'slidng_window' \(nearest known name: 'sliding_window'\), "
        r"'hc_mul' \(nearest known name: 'hc_mult'\)",
    ),
    "unknown nested key": (
        nested(FLASH, "rope_scaling", "betafast", value=32),
        r"unknown key 'rope_scaling.betafast' \(nearest known name: 'rope_scaling.beta_fast'\)",
    ),
    "mscale": (nested(FLASH, "rope_scaling", "mscale", value=1.0), "unknown key 'rope_scaling.mscale'"),
    "missing keys": (
        without(FLASH, "hidden_size", "num_hash_layers", "compress_ratios"),
        r"missing key 'hidden_size', 'compress_ratios', 'num_hash_layers'; add it",
    ),
    "missing rate": (
        changed(TINY, compress_rates={"compressed_sparse_attention": 4}),
        "compress_rates has no 'heavily_compressed_attention'",
    ),
    "missing yarn value": (
        changed(FLASH, rope_scaling={"type": "yarn", "factor": 16}),
        "YaRN needs rope_scaling.beta_fast",
    ),
    "yarn values without type": (
        changed(FLASH, rope_scaling=without(FLASH["rope_scaling"], "type")),
        "rope type None conflicts with the YaRN values",
    ),
    "another rope type": (nested(FLASH, "rope_scaling", "type", value="linear"), "rope type 'linear'"),
    "unknown layer type": (
        changed(TINY, layer_types=["full_attention"] * 5),
        "layer_types 'full_attention': must be one of sliding_attention",
    ),
    "object expected": (changed(FLASH, rope_scaling="yarn"), "rope_scaling 'yarn': must be an object"),
    "negative ratio": (changed(FLASH, compress_ratios=[-4] * 44), r"compress_ratios\[0\] -4"),
    "too many hash layers": (changed(FLASH, num_hash_layers=44), "num_hash_layers 44: must be 0 to"),
    "text for a number": (changed(FLASH, hidden_size="4096"), "hidden_size '4096': must be an integer"),
    "text for the depth": (changed(FLASH, num_hidden_layers="43"), "num_hidden_layers '43'"),
    "text for a fraction": (changed(TINY, rope_parameters=None, partial_rotary_factor="a"), "must be a number"),
    "zero": (changed(FLASH, index_topk=0), "index_topk 0"),
    "two end tokens": (changed(FLASH, eos_token_id=[1, 2]), r"eos_token_id \[1, 2\]: must be one id"),
    "float16": (changed(FLASH, torch_dtype="float16"), "torch_dtype 'float16'"),
    "kv_quant": (changed(FLASH, kv_quant="fp8"), "kv_quant 'fp8': must be one of 'official', 'none'"),
    "indexer not a power of two": (
        changed(FLASH, index_head_dim=96),
        r"index_head_dim 96: kv_quant 'official'.*power of two and a multiple of 32.*'none'",
    ),
    "indexer not a multiple of 32": (
        changed(FLASH, index_head_dim=16, qk_rope_head_dim=16),
        "index_head_dim 16: kv_quant 'official'",
    ),
    "indexer narrower than the rope": (
        changed(FLASH, index_head_dim=32),
        "index_head_dim 32: must be at least qk_rope_head_dim 64",
    ),
    "odd rope dim": (changed(FLASH, qk_rope_head_dim=63), "qk_rope_head_dim 63: must be even"),
    "groups": (changed(FLASH, o_groups=7), "o_groups 7: must divide num_attention_heads 64"),
    "experts": (changed(FLASH, num_experts_per_tok=257), "num_experts_per_tok 257"),
    "a base that yarn cannot divide by": (
        changed(FLASH, compress_rope_theta=1.0),
        "compress_rope_theta 1.0: YaRN needs a base above 1",
    ),
    "more than a size": (changed(FLASH, hc_mult=2**63), f"hc_mult {2**63}: must be at most {2**63 - 1}; lower it"),
    "more than a float": (changed(FLASH, hc_eps=10**400), "hc_eps inf: must be a finite number"),
}  # fmt: skip


@pytest.mark.parametrize(("document", "message"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_a_conflict_raises_with_name_value_limit_and_remedy(
    document: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_json(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("scoring_func", "sigmoid"),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("num_key_value_heads", 8),
        ("hidden_act", "gelu"),
        ("topk_method", "greedy"),
        ("tie_word_embeddings", True),
        ("model_type", "deepseek_v3"),
    ],
)
def test_a_value_that_asks_for_another_computation_raises(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} {value!r}: only .* is supported .*; set it to"):
        ModelConfig.from_json(changed(FLASH, **{key: value}))


def test_another_weight_tile_raises() -> None:
    document = nested(FLASH, "quantization_config", "weight_block_size", value=[64, 64])
    with pytest.raises(ConfigError, match=r"weight_block_size \[64, 64\]: only \[128, 128\]"):
        ModelConfig.from_json(document)


def test_two_models_of_different_top_k_live_side_by_side() -> None:
    models = [ModelConfig.from_json(changed(FLASH, index_topk=topk)) for topk in (8, 512, 1024)]
    assert [model.layers[2].index_topk for model in models] == [8, 512, 1024]


def test_kv_quant_official_asks_nothing_of_the_indexer_without_a_csa_layer() -> None:
    document = changed(FLASH, index_head_dim=96, compress_ratios=[128] * 44)
    assert ModelConfig.from_json(document).kv_quant == "official"


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff", "[" * 100_000])
def test_a_broken_file_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json: (not JSON|holds a list)"):
        ModelConfig.from_json(tmp_path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        ModelConfig.from_json(tmp_path / "nowhere")


@pytest.mark.parametrize("document", [FLASH, TINY, OFFICIAL], ids=["flash", "tiny", "official"])
def test_no_value_of_any_key_raises_anything_but_a_config_error(document: dict[str, Any]) -> None:
    paths = [(key,) for key in document]
    paths += [(k, i) for k, inner in document.items() if isinstance(inner, dict) for i in inner]
    for path in paths:
        numbers = (-1, 0, 2.5, 1e308, 10**400, float("nan"), True)
        for value in (*numbers, "x", None, [], {}, [None], [["a"]], {"a": 1}):
            with contextlib.suppress(ConfigError):
                ModelConfig.from_json(nested(document, *path, value=value))


def layer(**changes: Any) -> LayerConfig:
    row = attrs.asdict(ModelConfig.preset("tiny").layers[1], recurse=False)
    return LayerConfig(**(row | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 0}, "ratio 0: a csa layer needs at least 1"),
        ({"kind": SLIDING, "index_topk": 0}, "ratio 4: a sliding layer needs 0"),
        ({"kind": SLIDING, "ratio": 0, "index_topk": 0}, "a sliding layer has none"),
        ({"index_topk": 0}, "index_topk 0: a csa layer needs at least 1"),
        ({"kind": HCA}, "index_topk 64: a hca layer needs 0"),
        ({"hash_routing": 1}, "hash_routing 1: must be true or false"),
    ],
)
def test_a_layer_that_contradicts_itself_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer(**changes)


def test_a_table_of_another_length_or_order_raises() -> None:
    model = ModelConfig.preset("tiny")
    with pytest.raises(ConfigError, match=r"layers has 5 entries: .* need 6"):
        attrs.evolve(model, layers=model.main_layers)
    with pytest.raises(ConfigError, match=r"layers\[0\].is_draft True"):
        attrs.evolve(model, layers=model.draft_layers + model.main_layers)
    later = attrs.evolve(model.layers[1], entry_source=3)
    with pytest.raises(ConfigError, match=r"layers\[1\] reads layer 3"):
        attrs.evolve(model, layers=(model.layers[0], later, *model.layers[2:]))
