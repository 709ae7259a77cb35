"""Names and stored forms of published tensors, and the way from other names to these.

Source: spec/checkpoint.md (tensors; official name <-> transformers name).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from attrs import frozen

from dsv4.quant import WEIGHT_TILE

if TYPE_CHECKING:
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
