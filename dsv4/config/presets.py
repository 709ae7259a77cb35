"""The shipped model configs, as Python: the two releases and the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4.config.checks import nearest
from dsv4.config.layers import YarnConfig, kind_of_ratio, layer_table
from dsv4.errors import ConfigError

_SHARED: dict[str, Any] = {
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "yarn": YarnConfig(
        factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65_536
    ),
    "max_position_embeddings": 1_048_576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "kv_quant": "official",
}

_RELEASED: dict[str, Any] = _SHARED | {
    "vocab_size": 129_280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_experts_per_tok": 6,
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
}

_FLASH = _RELEASED | {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
}

_PRO = _RELEASED | {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}

_TINY = _SHARED | {
    "vocab_size": 320,  # 256 bytes and the special tokens, a multiple of 64
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "torch_dtype": "float32",
    "expert_dtype": "fp4",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tokenizer": "byte",
}


def preset_fields(name: str) -> dict[str, Any]:
    """Field values of a preset ModelConfig."""
    if name == "tiny":
        return _with_layers(_TINY, [0, 4, 32, 4, 32], num_hash=1)
    if name == "flash":
        return _with_layers(_FLASH, [0, 0, *[4, 128] * 20, 4], num_hash=3)
    if name == "pro":
        return _with_layers(_PRO, [128, 128, *[4, 128] * 29, 4], num_hash=3)
    known = ("tiny", "flash", "pro")
    raise ConfigError(
        f"preset {name!r}: must be one of {', '.join(known)}{nearest(name, known)}; choose one"
    )


def _with_layers(fields: dict[str, Any], ratios: Sequence[int], *, num_hash: int) -> dict[str, Any]:
    """Add the layer table: main layers of `ratios`, `num_hash` of them hash-routed, and one sliding
    draft layer."""
    main_and_draft = [*ratios, 0]
    layers = layer_table(
        [kind_of_ratio(ratio) for ratio in main_and_draft],
        main_and_draft,
        hash_routing=[layer < num_hash for layer in range(len(ratios))],
        num_drafts=1,
        rope_theta=fields["rope_theta"],
        compress_rope_theta=fields["compress_rope_theta"],
        yarn=fields["yarn"],
        index_topk=fields["index_topk"],
    )
    return fields | {
        "num_hidden_layers": len(ratios),
        "num_nextn_predict_layers": 1,
        "layers": layers,
    }
