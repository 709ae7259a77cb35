"""Small models whose numbers fit no power of two, and the pool and backend configs to go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from dsv4.config import BackendConfig, LayerKind, ModelConfig, PoolConfig, YarnConfig
from dsv4.config.layers import layer_table

SLIDING, CSA, HCA = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA

Layers = Sequence[tuple[LayerKind, int]]
MIXED: Layers = ((SLIDING, 0), (CSA, 4), (HCA, 6), (CSA, 3))
"""Every kind, two CSA ratios, none but one a power of two."""

YARN = YarnConfig(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64)


def small_model(
    layers: Layers = MIXED,
    *,
    window: int = 7,
    topk: int = 3,
    drafts: int = 1,
    official: bool = False,
) -> ModelConfig:
    """Layers of these kinds and ratios, then sliding draft layers. Two top-k if there are two CSA ratios."""
    table = [*layers, *[(SLIDING, 0)] * drafts]
    rows = layer_table(
        [kind for kind, _ in table],
        [ratio for _, ratio in table],
        hash_routing=[False] * len(layers),
        num_drafts=drafts,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        yarn=YARN,
        index_topk=topk,
    )
    first_csa = next((row.ratio for row in rows if row.kind is CSA), 0)
    rows = tuple(
        attrs.evolve(row, index_topk=topk + 2)
        if row.kind is CSA and row.ratio != first_csa
        else row
        for row in rows
    )
    return attrs.evolve(
        ModelConfig.preset("tiny"),
        vocab_size=97,
        hidden_size=8,
        hc_mult=2,
        head_dim=24,
        qk_rope_head_dim=8,
        index_n_heads=2,
        index_head_dim=32,
        sliding_window=window,
        kv_quant="official" if official else "none",
        num_hidden_layers=len(layers),
        num_nextn_predict_layers=drafts,
        layers=rows,
    )


def page_tokens_of(model: ModelConfig, least: int = 12) -> int:
    """The smallest legal page of at least that many tokens: small pages, so that short tests cross many."""
    unit = math.lcm(*model.ratios)
    return -(-least // unit) * unit


def pool_config(
    config_type: type[PoolConfig], model: ModelConfig, **options: int | str | None
) -> PoolConfig:
    """Four slots of 96 tokens on small pages, unless the options say otherwise."""
    fields: dict[str, int | str | None] = {
        "max_requests": 4,
        "max_context": 96,
        "page_tokens": page_tokens_of(model),
    }
    return config_type(**(fields | options))  # type: ignore[arg-type]


def backend_config(pool: PoolConfig, *, max_batch_tokens: int = 128) -> BackendConfig:
    """What a metadata builder is made from; the score budget is small, so that scores are tiled."""
    return BackendConfig(
        pool=pool, kernels="torch", max_batch_tokens=max_batch_tokens, score_budget_bytes=512
    )
