"""Models that ops are measured for: the published dims, and small ones of the same make for a CPU."""

from __future__ import annotations

from typing import Any

import attrs

from dsv4.bench.peers import BATCHES
from dsv4.config import LayerKind, ModelConfig
from dsv4.config.layers import layer_table

MODELS = ("flash", "pro")
SMALL_BATCHES = (1, 3)
PAGE_ENTRIES = 64
"""Index keys of a page: 256 tokens at ratio 4."""

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "index_n_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "index_head_dim": 32,
}
_SMALL_OF = {
    "flash": {"num_attention_heads": 4, "index_topk": 32},
    "pro": {"num_attention_heads": 8, "index_topk": 48},
}
_SMALL_LAYERS = (
    (LayerKind.SLIDING, 0), (LayerKind.CSA, 4), (LayerKind.HCA, 8), (LayerKind.CSA, 4),
)  # fmt: skip


def bench_model(name: str, *, small: bool) -> ModelConfig:
    """A preset without its draft layer; small: a few narrow layers, one of each kind at least."""
    model = ModelConfig.preset(name).without_drafts()
    if not small:
        return model
    fields = _SMALL | _SMALL_OF[name]
    table = layer_table(
        [kind for kind, _ in _SMALL_LAYERS],
        [ratio for _, ratio in _SMALL_LAYERS],
        hash_routing=[False] * len(_SMALL_LAYERS),
        num_drafts=0,
        rope_theta=model.rope_theta,
        compress_rope_theta=model.compress_rope_theta,
        yarn=model.yarn,
        index_topk=fields["index_topk"],
    )
    return attrs.evolve(model, layers=table, num_hidden_layers=len(table), **fields)


def default_batches(*, small: bool) -> tuple[int, ...]:
    return SMALL_BATCHES if small else BATCHES


def ratio_of(model: ModelConfig, kind: LayerKind) -> int:
    """The ratio of the first layer of a kind."""
    return next(layer.ratio for layer in model.layers if layer.kind is kind)
