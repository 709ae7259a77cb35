"""Every tensor of a published checkpoint, by spec/checkpoint.md: written from the config, not from the modules."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.model.official import Stored
from dsv4.model.tensor_names import PublishedTensor


def published_tensors(config: ModelConfig) -> tuple[PublishedTensor, ...]:
    """Every weight of the published checkpoint of a model, scales not counted, in file order."""
    return tuple(_model_tensors(config))


def _model_tensors(config: ModelConfig) -> Iterator[PublishedTensor]:
    vocab_by_hidden = (config.vocab_size, config.hidden_size)
    yield PublishedTensor("embed.weight", vocab_by_hidden, "bf16")
    yield PublishedTensor("head.weight", vocab_by_hidden, "bf16")
    yield PublishedTensor("norm.weight", (config.hidden_size,), "bf16")
    yield from _hyper_head(config, "")
    for i, layer in enumerate(config.main_layers):
        yield from _layer_tensors(config, layer, f"layers.{i}.")
    for i, layer in enumerate(config.draft_layers):
        yield from _layer_tensors(config, layer, f"mtp.{i}.")
        yield from _draft_tensors(config, f"mtp.{i}.")


def _hyper_head(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    streams = config.hc_mult
    yield PublishedTensor(f"{prefix}hc_head_fn", (streams, streams * config.hidden_size), "fp32")
    yield PublishedTensor(f"{prefix}hc_head_base", (streams,), "fp32")
    yield PublishedTensor(f"{prefix}hc_head_scale", (1,), "fp32")


def _draft_tensors(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    hidden = config.hidden_size
    for name in ("e_proj", "h_proj"):
        yield PublishedTensor(f"{prefix}{name}.weight", (hidden, hidden), "fp8")
    for name in ("enorm", "hnorm", "norm"):
        yield PublishedTensor(f"{prefix}{name}.weight", (hidden,), "bf16")
    yield from _hyper_head(config, prefix)


def _layer_tensors(
    config: ModelConfig, layer: LayerConfig, prefix: str
) -> Iterator[PublishedTensor]:
    hidden, streams = config.hidden_size, config.hc_mult
    mixes = (2 + streams) * streams
    for name in ("attn", "ffn"):
        yield PublishedTensor(f"{prefix}{name}_norm.weight", (hidden,), "bf16")
        yield PublishedTensor(f"{prefix}hc_{name}_fn", (mixes, streams * hidden), "fp32")
        yield PublishedTensor(f"{prefix}hc_{name}_base", (mixes,), "fp32")
        yield PublishedTensor(f"{prefix}hc_{name}_scale", (3,), "fp32")
    yield from _attention_tensors(config, f"{prefix}attn.")
    if layer.ratio:
        overlap = 2 if layer.kind is LayerKind.CSA else 1
        channels = overlap * config.head_dim
        yield from _compressor_tensors(config, layer, f"{prefix}attn.compressor.", channels)
    if layer.kind is LayerKind.CSA:
        yield from _indexer_tensors(config, layer, f"{prefix}attn.indexer.")
    yield from _ffn_tensors(config, layer, f"{prefix}ffn.")


def _attention_tensors(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    hidden, rank, dim = config.hidden_size, config.q_lora_rank, config.head_dim
    heads_by_dim, low_rank = config.num_attention_heads * dim, config.o_groups * config.o_lora_rank
    yield PublishedTensor(f"{prefix}attn_sink", (config.num_attention_heads,), "fp32")
    yield PublishedTensor(f"{prefix}wq_a.weight", (rank, hidden), "fp8")
    yield PublishedTensor(f"{prefix}q_norm.weight", (rank,), "bf16")
    yield PublishedTensor(f"{prefix}wq_b.weight", (heads_by_dim, rank), "fp8")
    yield PublishedTensor(f"{prefix}wkv.weight", (dim, hidden), "fp8")
    yield PublishedTensor(f"{prefix}kv_norm.weight", (dim,), "bf16")
    yield PublishedTensor(
        f"{prefix}wo_a.weight", (low_rank, heads_by_dim // config.o_groups), "fp8"
    )
    yield PublishedTensor(f"{prefix}wo_b.weight", (hidden, low_rank), "fp8")


def _compressor_tensors(
    config: ModelConfig, layer: LayerConfig, prefix: str, channels: int
) -> Iterator[PublishedTensor]:
    """`channels` of kv and of gate; an overlapping compressor has two halves of the entry's width."""
    overlap = 2 if layer.kind is LayerKind.CSA else 1
    yield PublishedTensor(f"{prefix}ape", (layer.ratio, channels), "fp32")
    for name in ("wkv", "wgate"):
        yield PublishedTensor(f"{prefix}{name}.weight", (channels, config.hidden_size), "bf16")
    yield PublishedTensor(f"{prefix}norm.weight", (channels // overlap,), "bf16")


def _indexer_tensors(
    config: ModelConfig, layer: LayerConfig, prefix: str
) -> Iterator[PublishedTensor]:
    heads, dim = config.index_n_heads, config.index_head_dim
    yield PublishedTensor(f"{prefix}wq_b.weight", (heads * dim, config.q_lora_rank), "fp8")
    yield PublishedTensor(f"{prefix}weights_proj.weight", (heads, config.hidden_size), "bf16")
    yield from _compressor_tensors(config, layer, f"{prefix}compressor.", 2 * dim)


def _ffn_tensors(config: ModelConfig, layer: LayerConfig, prefix: str) -> Iterator[PublishedTensor]:
    hidden, experts = config.hidden_size, config.n_routed_experts
    yield PublishedTensor(f"{prefix}gate.weight", (experts, hidden), "bf16")
    if layer.hash_routing:
        table = (config.vocab_size, config.num_experts_per_tok)
        yield PublishedTensor(f"{prefix}gate.tid2eid", table, "i64")
    else:
        yield PublishedTensor(f"{prefix}gate.bias", (experts,), "fp32")
    routed: Stored = "fp8" if config.expert_dtype == "fp8" else "fp4"
    for e in range(experts):
        yield from _expert_tensors(config, f"{prefix}experts.{e}.", routed)
    yield from _expert_tensors(config, f"{prefix}shared_experts.", "fp8")


def _expert_tensors(config: ModelConfig, prefix: str, stored: Stored) -> Iterator[PublishedTensor]:
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    yield PublishedTensor(f"{prefix}w1.weight", (inter, hidden), stored)
    yield PublishedTensor(f"{prefix}w2.weight", (hidden, inter), stored)
    yield PublishedTensor(f"{prefix}w3.weight", (inter, hidden), stored)
