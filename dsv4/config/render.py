"""From a ModelConfig to a config.json that parses back to an equal one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from dsv4.config.keys import FIXED, LAYER_TYPES, MLP_TYPES, REQUIRED
from dsv4.config.layers import LayerConfig, LayerKind, kind_of_ratio, layer_table
from dsv4.errors import ConfigError

if TYPE_CHECKING:
    from dsv4.config.model import ModelConfig

_PLAIN = (
    *REQUIRED,
    "qk_rope_head_dim",
    "rope_theta",
    "compress_rope_theta",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "bos_token_id",
    "eos_token_id",
    "torch_dtype",
)
_CONSTANT = (
    "model_type",
    "attention_bias",
    "hidden_act",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "n_shared_experts",
    "num_key_value_heads",
    "tie_word_embeddings",
)
_QUANTIZATION = "quantization_config."


def model_document(model: ModelConfig) -> dict[str, Any]:
    """The JSON object: published style if ratios alone tell the kinds, else with `layer_types`.

    Raises ConfigError for a layer table that neither style can express.
    """
    document: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"]}
    document |= {name: FIXED[name][0][0] for name in _CONSTANT}
    document |= {name: getattr(model, name) for name in _PLAIN}
    document |= _layers(model)
    if model.yarn is not None:
        document["rope_scaling"] = {"type": "yarn"} | attrs.asdict(model.yarn)
    if model.expert_dtype is not None:
        document["expert_dtype"] = model.expert_dtype
    if model.expert_dtype is not None and model.kv_quant == "official":
        # Quantised weights and official KV rounding: the published block says both.
        document["quantization_config"] = {
            place.removeprefix(_QUANTIZATION): allowed[0]
            for place, (allowed, _) in FIXED.items()
            if place.startswith(_QUANTIZATION)
        }
    else:
        document["kv_quant"] = model.kv_quant
    if model.tokenizer is not None:
        document["dsv4_tokenizer"] = model.tokenizer
    return document


def _layers(model: ModelConfig) -> dict[str, Any]:
    """The keys of the layer table, in the first style whose reading gives the same table."""
    ratios = [layer.ratio for layer in model.layers]
    kinds = [layer.kind for layer in model.layers]
    hashed = [layer.hash_routing for layer in model.main_layers]
    num_hash = sum(hashed)
    listed = [kind_of_ratio(ratio) for ratio in ratios]
    prefix = [layer < num_hash for layer in range(model.num_hidden_layers)]
    if _table(model, listed, prefix) == model.layers:
        return {"compress_ratios": ratios, "num_hash_layers": num_hash}
    rates = {kind: ratio for kind, ratio in zip(kinds, ratios, strict=True) if ratio}
    draft_kinds = {layer.kind for layer in model.draft_layers}
    if (
        _table(model, kinds, hashed) != model.layers
        or any(rates.get(kind, 0) != ratio for kind, ratio in zip(kinds, ratios, strict=True))
        or not draft_kinds <= {LayerKind.SLIDING}
    ):
        raise ConfigError(
            "layers: no config.json style can express this table: several ratios of one kind, a "
            "draft layer that is not sliding, or a layer with a rotary base, top-k or source of "
            "its own; change the table or keep it in Python"
        )
    type_names = {kind: name for name, kind in LAYER_TYPES.items()}
    mlp_names = {routing: name for name, routing in MLP_TYPES.items()}
    return {
        "layer_types": [type_names[kind.value] for kind in kinds[: model.num_hidden_layers]],
        "compress_rates": {type_names[kind.value]: ratio for kind, ratio in rates.items()},
        "mlp_layer_types": [mlp_names[routing] for routing in hashed],
    }


def _table(
    model: ModelConfig, kinds: Sequence[LayerKind], hash_routing: Sequence[bool]
) -> tuple[LayerConfig, ...]:
    """The table that a reader builds from these kinds and the model's ratios."""
    return layer_table(
        kinds,
        [layer.ratio for layer in model.layers],
        hash_routing=hash_routing,
        num_drafts=model.num_nextn_predict_layers,
        rope_theta=model.rope_theta,
        compress_rope_theta=model.compress_rope_theta,
        yarn=model.yarn,
        index_topk=model.index_topk,
    )
