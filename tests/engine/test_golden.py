"""The engine on a real model: the golden greedy continuations, through both pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from dsv4.config import BackendConfig, EngineConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.engine.engine import Engine
from dsv4.model.model import load

NEW_TOKENS = 8


@pytest.mark.parametrize("pool_type", [UnifiedPoolConfig, ThreePoolConfig])
def test_golden_prompts_decoded_together_in_chunks_give_the_golden_tokens(
    golden: Path, tmp_path: Path, pool_type: type[PoolConfig]
) -> None:
    for name in ("config.json", "weights.safetensors"):
        (tmp_path / name).symlink_to(golden / "tiny" / name)
    files = sorted((golden / "tiny").glob("prompt*.safetensors"))
    golden_tensors = [load_file(file) for file in files]
    prompts = [tensors["input_ids"].flatten().tolist() for tensors in golden_tensors]
    # Fewer slots than prompts, and chunks that split windows and entries.
    backend = BackendConfig(pool=pool_type(max_requests=3, max_context=512), max_batch_tokens=40)
    engine = Engine(load(tmp_path, backend=backend), EngineConfig(backend=backend, chunk_tokens=29))
    free = engine.pool.num_free_slots, engine.pool.num_free_pages
    done = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    expected = [tuple(t["greedy.ids"].flatten().tolist()) for t in golden_tensors]
    assert [completion.token_ids for completion in done] == expected
    assert (engine.pool.num_free_slots, engine.pool.num_free_pages) == free
