"""The checkpoint that the package ships: its config, its size and format, and that both pools read the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

import dsv4
from dsv4.config import BackendConfig, ModelConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.engine import Engine

FOLDER = Path(dsv4.__file__).parent / "data" / "tiny"
PROMPT = b"import os\nimport sys\n\n\nclass Stack:\n    def __init__(self, items=None):\n"


def test_the_preset_is_the_shipped_config() -> None:
    assert ModelConfig.preset("tiny") == ModelConfig.from_json(FOLDER / "config.json")


def test_the_shipped_config_fits_its_limits() -> None:
    config = ModelConfig.preset("tiny")
    entries_at_4k = 4096 // 4
    assert config.index_topk < entries_at_4k / 8
    assert config.sliding_window <= 64
    assert config.nope_head_dim % 64 == 0
    assert (config.hc_mult, config.hc_sinkhorn_iters) == (4, 20)
    assert [layer.ratio for layer in config.main_layers] == [0, 4, 32, 4, 32]
    assert len(config.draft_layers) == 1
    assert config.kv_quant == "official"


def test_the_shipped_files_are_small_and_in_the_published_format() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10 * 2**20
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes["layers.1.attn.wkv.weight"] == "F8_E4M3"
    assert dtypes["layers.1.attn.wkv.scale"] == "F8_E8M0"
    assert dtypes["layers.1.ffn.experts.0.w1.weight"] == "I8"
    assert dtypes["layers.1.attn.attn_sink"] == "F32"
    assert dtypes["embed.weight"] == "BF16"
    assert "mtp.0.e_proj.weight" in dtypes


def greedy(pool: type[PoolConfig], num_tokens: int) -> list[int]:
    backend = BackendConfig(pool=pool(max_requests=1, max_context=512))
    engine = Engine(dsv4.load("tiny", backend=backend))
    slot = engine.pool.acquire()
    logits_BV = engine.prefill(slot, list(PROMPT))
    found: list[int] = []
    for _ in range(num_tokens):
        found.append(int(logits_BV[0].argmax()))
        logits_BV = engine.decode([slot], found[-1:])
    return found


@pytest.fixture(scope="module")
def unified() -> list[int]:
    return greedy(UnifiedPoolConfig, 60)


def test_both_pools_continue_a_prompt_with_the_same_bytes(unified: list[int]) -> None:
    assert greedy(ThreePoolConfig, 60) == unified


def test_the_continuation_of_an_initialiser_assigns_its_argument(unified: list[int]) -> None:
    text = bytes(unified).decode()
    assert text.startswith("        self.")
    assert "items" in text.splitlines()[0]
