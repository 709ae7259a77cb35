"""transformers as a live oracle: ten random small models, prefill and 40 decode steps through both pools.

Weights are in the manner of the golden fixtures (tests/scenarios/weights.py). A draw in which the oracle itself comes
close to a tie, of index scores or router scores, is thrown away: there both answers would be right.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attrs import define, frozen
from torch import Tensor

from dsv4.config import ModelConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.model.checkpoint import load_tensors
from dsv4.model.decoder import Decoder
from dsv4.model.tensor_names import official_name
from tests.scenarios.harness import Session
from tests.scenarios.weights import golden_style

transformers = pytest.importorskip("transformers", reason="the oracle is transformers 5.23.0")
modeling = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4", reason="a transformers with deepseek_v4"
)

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
TOLERANCE = 5e-5
MARGIN = 1e-4
DECODE_STEPS = 40
SEEDS = range(10)


def random_document(seed: int) -> dict[str, Any]:
    """A small config of any shape that both sides allow, each kind of layer in it."""
    rng = random.Random(seed)
    pick = rng.choice
    csa, hca = pick([2, 3, 4, 4, 5, 8]), pick([6, 7, 12, 16, 24, 32])
    layers = [SLIDING, CSA, HCA, *rng.choices([CSA, HCA, SLIDING], k=pick([0, 1, 2]))]
    rng.shuffle(layers)
    groups = pick([1, 2, 3])
    head_dim, rope = pick([(16, 4), (24, 8), (32, 8), (40, 8), (64, 16), (48, 32)])
    experts = pick([3, 4, 6, 8])
    hashed = pick([0, 1, 2])
    return {
        "model_type": "deepseek_v4",
        "vocab_size": pick([50, 64, 97]),
        "hidden_size": pick([32, 40, 48, 64]),
        "num_hidden_layers": len(layers),
        "num_attention_heads": groups * pick([1, 2, 3]),
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "qk_rope_head_dim": rope,
        "partial_rotary_factor": rope / head_dim,
        "q_lora_rank": pick([16, 24, 33]),
        "o_groups": groups,
        "o_lora_rank": pick([8, 12, 16]),
        "sliding_window": pick([2, 3, 5, 8, 13, 16, 30]),
        "layer_types": layers,
        "compress_rates": {CSA: csa, HCA: hca},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (len(layers) - hashed),
        "index_n_heads": pick([6, 8, 12]),
        "index_head_dim": pick([32, 36, 48]),
        "index_topk": pick([1, 2, 3, 5, 8]),
        "n_routed_experts": experts,
        "num_experts_per_tok": pick([1, 2, min(3, experts - 1)]),
        "moe_intermediate_size": pick([8, 12, 20]),
        "routed_scaling_factor": pick([1.0, 1.5, 2.5]),
        "swiglu_limit": pick([0.7, 1.5, 10.0]),
        "hc_mult": pick([1, 2, 3, 4]),
        "hc_sinkhorn_iters": pick([1, 2, 7, 20]),
        "hc_eps": pick([1e-6, 1e-3]),
        "rms_norm_eps": pick([1e-6, 1e-5]),
        "rope_theta": pick([10000.0, 500.0]),
        "compress_rope_theta": pick([160000.0, 40000.0]),
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": pick([4.0, 16.0]),
            "beta_fast": pick([32.0, 16.0]),
            "beta_slow": 1.0,
            "original_max_position_embeddings": pick([256, 4096, 65536]),
        },
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
    }


@define
class Margins:
    """Smallest gaps between the last chosen and the first rejected score that the oracle saw."""

    index: float = math.inf
    router: float = math.inf


@contextmanager
def watched(model: Any, topk: int) -> Iterator[Margins]:
    """Margins of one forward of a whole sequence without a cache."""
    found, handles = Margins(), []
    rate = model.config.compress_rates[CSA]

    def indexed(_module: Any, _inputs: Any, scores_BST: Tensor) -> None:
        for t, row in enumerate(scores_BST[0]):
            ranked = row[: (t + 1) // rate].sort(descending=True).values
            if len(ranked) > topk:
                found.index = min(found.index, float(ranked[topk - 1] - ranked[topk]))

    def routed(module: Any, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        scores = torch.nn.functional.softplus(output[0]).sqrt() + module.e_score_correction_bias
        ranked, k = scores.sort(descending=True).values, module.top_k
        if ranked.shape[-1] > k:
            found.router = min(found.router, float((ranked[:, k - 1] - ranked[:, k]).min()))

    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4IndexerScorer):
            handles.append(module.register_forward_hook(indexed))
        if isinstance(module, modeling.DeepseekV4TopKRouter):
            handles.append(module.register_forward_hook(routed))
    yield found
    for handle in handles:
        handle.remove()


@frozen(eq=False)
class Case:
    """What the oracle says about one random sequence."""

    decoder: Decoder
    ids: tuple[int, ...]
    prompt: int
    prefill: Tensor
    """[prompt, V]"""
    steps: Tensor
    """[DECODE_STEPS, V], from its cache, one token at a time."""


def fill(model: Any, rng: torch.Generator, experts: int) -> None:
    for name, tensor in model.state_dict().items():
        tensor.copy_(golden_style(official_name(name), tensor.shape, rng, experts))


@functools.cache
@torch.no_grad()
def draw(seed: int) -> Case:
    """Config, weights and tokens, the latter two redrawn until the oracle's own choices are clear."""
    document = random_document(seed)
    config = transformers.models.deepseek_v4.DeepseekV4Config(
        **{k: v for k, v in document.items() if k != "model_type"}, attn_implementation="eager"
    )
    assert config.qk_rope_head_dim == document["qk_rope_head_dim"]
    model = modeling.DeepseekV4ForCausalLM(config).float().eval()
    prompt = 9 + 7 * seed
    for attempt in range(200):
        rng = torch.Generator().manual_seed(1000 * seed + attempt)
        fill(model, rng, config.n_routed_experts)
        ids = torch.randint(config.vocab_size, (1, prompt + DECODE_STEPS), generator=rng)
        with watched(model, config.index_topk) as margins:
            model(input_ids=ids, use_cache=False)
        if min(margins.index, margins.router) >= MARGIN:
            break
    else:
        raise AssertionError(f"seed {seed}: no clear draw in 200")
    out = model(input_ids=ids[:, :prompt], use_cache=True)
    prefill, steps = out.logits[0], []
    for at in range(prompt, prompt + DECODE_STEPS):
        out = model(
            input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True
        )
        steps.append(out.logits[0])
    decoder = Decoder(ModelConfig.from_json(document))
    load_tensors(decoder, model.state_dict())
    return Case(decoder, tuple(ids[0].tolist()), prompt, prefill, torch.cat(steps))


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def case(request: pytest.FixtureRequest) -> Case:
    return draw(request.param)


@pytest.mark.parametrize("family", [UnifiedPoolConfig, ThreePoolConfig])
def test_prefill_and_forty_decode_steps_equal_transformers(
    case: Case, family: type[PoolConfig]
) -> None:
    page = math.lcm(*case.decoder.config.ratios)
    session = Session(family, case.decoder, slots=2, context=len(case.ids), page=page)
    slot = session.open()
    rows = session.feed_one(slot, case.ids[: case.prompt])
    torch.testing.assert_close(rows, case.prefill, atol=TOLERANCE, rtol=0)
    steps = [session.feed_one(slot, [token]) for token in case.ids[case.prompt :]]
    torch.testing.assert_close(torch.cat(steps), case.steps, atol=TOLERANCE, rtol=0)


def test_the_ten_configs_cover_what_they_are_meant_to() -> None:
    """Rates that are no power of two, single streams, no hash layer, top-k of one: each at least once."""
    documents = [random_document(seed) for seed in SEEDS]
    rates = {d["compress_rates"][CSA] for d in documents}
    assert rates - {1, 2, 4, 8}
    assert {d["compress_rates"][HCA] for d in documents} - {8, 16, 32}
    for key, least in (
        ("sliding_window", 4), ("hc_mult", 3), ("hc_sinkhorn_iters", 3), ("o_groups", 2),
        ("index_topk", 3), ("head_dim", 4), ("n_routed_experts", 3), ("num_experts_per_tok", 2),
    ):  # fmt: skip
        assert len({d[key] for d in documents}) >= least, key
    assert {d["mlp_layer_types"].count("hash_moe") for d in documents} == {0, 1, 2}
