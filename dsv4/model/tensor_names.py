"""Names, shapes and stored dtypes of a published checkpoint, and the way from other names to these.

Source: spec/checkpoint.md (tensors; official name <-> transformers name).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from dsv4.config import LayerKind
from dsv4.quant import WEIGHT_TILE

if TYPE_CHECKING:
    from dsv4.config import LayerConfig, ModelConfig
    from dsv4.model.official import Stored

FP4_BLOCK = 32
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
_PLAIN_CODES = {"bf16": "BF16", "fp32": "F32", "i64": "I64"}


@frozen
class StoredPart:
    """One tensor of a file: `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@frozen
class PublishedTensor:
    """A published weight: `shape` is that of its values, `stored` its published form."""

    name: str
    shape: tuple[int, ...]
    stored: Stored

    def parts(self) -> tuple[StoredPart, ...]:
        """What a file holds for it: the tensor, and for fp8 and fp4 a scale tensor."""
        if self.stored in _PLAIN_CODES:
            return (StoredPart(self.name, _PLAIN_CODES[self.stored], self.shape),)
        code, packed = ("F8_E4M3", 1) if self.stored == "fp8" else ("I8", 2)
        weight = StoredPart(self.name, code, (*self.shape[:-1], self.shape[-1] // packed))
        scale_shape = tile_grid(self.shape) if self.stored == "fp8" else block_grid(self.shape)
        return weight, StoredPart(scale_name(self.name), "F8_E8M0", scale_shape)


def scale_name(weight_name: str) -> str:
    """`X.scale` of the weight `X.weight`."""
    return weight_name.removesuffix("weight") + "scale"


def tile_grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of 128 x 128 tiles, over the last two dims."""
    return (*shape[:-2], *(-(-width // WEIGHT_TILE) for width in shape[-2:]))


def block_grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of 1 x 32 blocks, over the last dim."""
    return (*shape[:-1], -(-shape[-1] // FP4_BLOCK))


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


FUSED_GATE_UP = "experts.gate_up.weight"
FUSED_DOWN = "experts.down.weight"

_TOP_NAMES = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^hc_head\.hc_", "hc_head_"),
        (r"^(attn|ffn)_hc\.(fn|base|scale)$", r"hc_\1_\2"),
        (r"^input_layernorm\.", "attn_norm."),
        (r"^post_attention_layernorm\.", "ffn_norm."),
        (r"^self_attn\.", "attn."),
        (r"^mlp\.", "ffn."),
        (r"^attn\.sinks$", "attn.attn_sink"),
        (r"^attn\.q_a_proj\.", "attn.wq_a."),
        (r"^attn\.q_a_norm\.", "attn.q_norm."),
        (r"^attn\.q_b_proj\.", "attn.wq_b."),
        (r"^attn\.kv_proj\.", "attn.wkv."),
        (r"^attn\.o_a_proj\.", "attn.wo_a."),
        (r"^attn\.o_b_proj\.", "attn.wo_b."),
        # transformers nests the indexer in the compressor, and the indexer's own compressor nowhere.
        (r"^attn\.compressor\.indexer\.(kv|gate|position)_", r"attn.indexer.compressor.\1_"),
        (r"^attn\.compressor\.indexer\.", "attn.indexer."),
        (r"^attn\.indexer\.q_b_proj\.", "attn.indexer.wq_b."),
        (r"^attn\.indexer\.scorer\.", "attn.indexer."),
        (r"compressor\.kv_proj\.", "compressor.wkv."),
        (r"compressor\.gate_proj\.", "compressor.wgate."),
        (r"compressor\.kv_norm\.", "compressor.norm."),
        (r"compressor\.position_bias$", "compressor.ape"),
        (r"^ffn\.gate\.e_score_correction_bias$", "ffn.gate.bias"),
        (r"^ffn\.experts\.gate_up_proj(\.weight)?$", f"ffn.{FUSED_GATE_UP}"),
        (r"^ffn\.experts\.down_proj(\.weight)?$", f"ffn.{FUSED_DOWN}"),
        (r"^ffn\.experts\.(gate_up|down)_proj[._](weight_)?scale(_inv)?$", r"ffn.experts.\1.scale"),
        (r"experts\.(\d+\.)?gate_proj\.", r"experts.\1w1."),
        (r"experts\.(\d+\.)?down_proj\.", r"experts.\1w2."),
        (r"experts\.(\d+\.)?up_proj\.", r"experts.\1w3."),
        (r"\.weight_scale_inv$", ".scale"),
    )
)


def official_name(name: str) -> str:
    """Published name of a tensor under its published or transformers name, `model.` in front or not.

    Experts fused over an axis have no published name: they become `...ffn.experts.gate_up.weight` and
    `...ffn.experts.down.weight`. Names that no rule knows come back as they are.
    """
    name = name.removeprefix("model.")
    block = re.match(r"(layers|mtp)\.\d+\.", name)
    prefix, local = name[: block.end()] if block else "", name[block.end() :] if block else name
    if not block:
        local = _TOP_NAMES.get(local, local)
    for pattern, replacement in _RULES:
        local = pattern.sub(replacement, local)
    return prefix + local
