"""Small models with weights in the manner of the golden fixtures: nothing is zero, one, or symmetric."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.decoder import Decoder

YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
    "attention_factor": 1.0,
}
KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    16: "heavily_compressed_attention",
}


def tiny_document(*, hca: int = 16, **changes: Any) -> dict[str, Any]:
    """The model of the scenarios: layers [0, 4, 16], window 16, top-k 8, 4 heads of 64 = 48 + 16."""
    document: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "vocab_size": 64,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "layer_types": [KINDS[0], KINDS[4], KINDS[16]],
        "compress_rates": {KINDS[4]: 4, KINDS[16]: hca},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 1.5,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {**YARN, "rope_theta": 160000.0},
        },
        "max_position_embeddings": 1048576,
        "kv_quant": "none",
    }
    return document | changes


def golden_style(name: str, shape: torch.Size, rng: torch.Generator, experts: int) -> Tensor:
    """A value for a published tensor. What real checkpoints store in bf16 or less is exact in bf16."""

    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=rng, device="cpu") * std + mean

    if name.endswith("tid2eid"):
        rows = [
            torch.randperm(experts, generator=rng, device="cpu")[: shape[1]]
            for _ in range(shape[0])
        ]
        return torch.stack(rows)
    if name.endswith("_fn"):
        return normal(1.5 / math.sqrt(shape[-1]))
    if name.endswith("_base"):
        return normal(0.7)
    if name.endswith("_scale"):
        return 0.6 + torch.rand(shape, generator=rng, device="cpu")
    spread = {"gate.bias": (0.4, 0.0), "attn_sink": (1.0, 0.5), "ape": (1.0, 0.0)}
    for suffix, (std, mean) in spread.items():
        if name.endswith(suffix):
            return normal(std, mean)
    if len(shape) == 1:
        return normal(0.3, 1.0).bfloat16().float()
    if name.startswith("embed"):
        return normal(1.0).bfloat16().float()
    gain = 1.5 if "experts" in name or "compressor" in name else 1.0
    return normal(gain / math.sqrt(shape[-1])).bfloat16().float()


def random_decoder(config: ModelConfig, seed: int) -> Decoder:
    """A decoder of `config` whose weights follow from the seed."""
    decoder, rng = Decoder(config), torch.Generator("cpu").manual_seed(seed)
    for name, target in decoder.official_tensors().items():
        value = golden_style(name, target.view.shape, rng, config.n_routed_experts)
        target.view.copy_(value)
    return decoder


def weights_of(decoder: Decoder) -> Mapping[str, Tensor]:
    return {name: tensor.view for name, tensor in decoder.official_tensors().items()}


@functools.cache
def tiny_decoder(seed: int = 1, **changes: Any) -> Decoder:
    return random_decoder(ModelConfig.from_json(tiny_document(**changes)), seed)
