"""Training on a micro config: it learns, it computes what the engine computes, and its data are what they claim."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4.config import BackendConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.engine.engine import Engine
from dsv4.model.checkpoint import save_checkpoint
from dsv4.model.decoder import Decoder
from dsv4.model.model import load
from dsv4.pool.base import Region

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import recall
import train_tiny
from tiny_training.data import ANSWER_WEIGHT, KEY_PREFIX, Planter, batches, recall_prompt
from tiny_training.dense import DenseForward, DenseMode
from tiny_training.regions import Regions
from tiny_training.trainer import Trainer
from tiny_training.weights import initialise, round_as_stored

TEXT = np.array([*b"for i in range(10):\n    total += i * weights[i]\n"] * 200, np.int16)


def stored_model(kv_quant: str) -> Decoder:
    """An untrained model whose weights are what its checkpoint holds, none of them trivial."""
    model = Decoder(evolve(train_tiny.micro_plan().config, kv_quant=kv_quant))
    initialise(model, 3)
    rng = torch.Generator().manual_seed(4)
    for name, target in model.official_tensors().items():
        if name.endswith(("bias", "sink", "scale", "base", "ape", "norm.weight")):
            target.view.add_(torch.randn(target.view.shape, generator=rng) * 0.3)
        if name == "head.weight":
            target.view.mul_(5)
    round_as_stored(model)
    return model


@pytest.fixture(scope="module")
def micro() -> Decoder:
    return stored_model("official")


def engine_of(model: Decoder, pool: type[PoolConfig], folder: Path) -> Engine:
    save_checkpoint(model, model.config, folder / "micro")
    backend = BackendConfig(pool=pool(max_requests=2, max_context=256))
    return Engine(load(folder / "micro", backend=backend))


@pytest.mark.parametrize("kv_quant", ["none", "official"])
@pytest.mark.parametrize("pool", [UnifiedPoolConfig, ThreePoolConfig])
def test_the_dense_forward_gives_the_engines_logits(
    tmp_path: Path, pool: type[PoolConfig], kv_quant: str
) -> None:
    model = stored_model(kv_quant)
    engine = engine_of(model, pool, tmp_path)
    ids = torch.randint(256, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    slot = engine.pool.acquire()
    paged = [engine.prefill(slot, ids[:90], rows="all")]
    paged += [engine.decode([slot], [token]) for token in ids[90:]]
    dense = DenseForward(model, len(ids), DenseMode(), Regions())(torch.tensor([ids]))
    error_T = (torch.cat(paged) - dense.logits_BSV[0]).abs().amax(-1)
    assert dense.logits_BSV.std() > 0.5
    if kv_quant == "none":
        assert error_T.max() <= 1e-4
    else:
        # where both stand at the edge between two codes, a last bit decides, and later tokens see another value
        assert error_T.median() <= 1e-4
        assert error_T.max() <= 2e-2


def test_rounding_twice_changes_nothing(micro: Decoder) -> None:
    before = {name: t.view.clone() for name, t in micro.official_tensors().items()}
    round_as_stored(micro)
    for name, target in micro.official_tensors().items():
        assert torch.equal(target.view, before[name]), name


@pytest.mark.parametrize("phase", train_tiny.micro_plan().phases, ids=lambda phase: phase.name)
def test_a_few_steps_lower_the_loss(phase: train_tiny.Phase) -> None:
    model = Decoder(train_tiny.micro_plan().config)
    initialise(model, 1)
    trainer = Trainer(model, peak_rate=0.3, regions=Regions())
    phase = evolve(phase, num_tokens=96)
    planter = Planter(TEXT, num_tokens=96, recall=0.0, max_asks=1, nearest=20)
    data = batches(planter, num_sequences=1, seed=1)
    step = trainer.prepare(phase, data)
    trainer.set_progress(0.0)
    batch = next(data)
    losses = [step(batch)[0].item() for _ in range(4)]
    data.close()
    assert losses[-1] < losses[0] - 0.3
    untrained = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert untrained == []


def test_a_planted_answer_repeats_the_key_and_only_its_bytes_weigh_more() -> None:
    planter = Planter(TEXT, num_tokens=700, recall=1.0, max_asks=3, nearest=60)
    rng = np.random.default_rng(1)
    asked = 0
    for _ in range(20):
        ids, weights = planter.sample(rng)
        assert len(ids) == len(weights) == 700
        text = bytes(int(i) for i in ids)
        first, *asks = [at for at in range(700) if text.startswith(KEY_PREFIX, at)]
        key = text[first + 7 : first + 11]
        assert (weights[first + 7 : first + 11] == 0).all()
        for at in asks:
            assert text[at + 7 : at + 11] == key[: 700 - at - 7]
            assert (weights[at + 7 : at + 11] == ANSWER_WEIGHT).all()
        asked += len(asks)
        assert (weights == ANSWER_WEIGHT).sum() <= 4 * len(asks)
        assert (weights == 0).sum() == 4
    assert asked >= 20


def test_a_recall_prompt_asks_exactly_the_distance_after_the_statement() -> None:
    ids, key = recall_prompt(TEXT, np.random.default_rng(2), 256)
    text = bytes(ids)
    end = text.index(KEY_PREFIX + key + b"\n") + len(KEY_PREFIX) + 5
    assert text.endswith(b"\n" + KEY_PREFIX)
    assert len(text) - len(KEY_PREFIX) - end == 256


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Pools start uninitialised: rows nobody wrote may hold NaN, which equals nothing."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("pool", [UnifiedPoolConfig, ThreePoolConfig])
def test_the_control_zeroes_the_entries_of_its_slot_and_nothing_else(
    micro: Decoder, tmp_path: Path, pool: type[PoolConfig]
) -> None:
    engine = engine_of(micro, pool, tmp_path)
    slots = [engine.pool.acquire() for _ in range(2)]
    for slot in slots:
        engine.prefill(slot, [65 + i % 20 for i in range(60)])
    before = [engine.pool.export(slot).tensors for slot in slots]
    recall.zero_entries(engine.pool, slots[0])
    after = [engine.pool.export(slot).tensors for slot in slots]
    entries = f".{Region.ENTRIES.value}"
    for name, tensor in before[0].items():
        if name.endswith(entries):
            assert tensor.any()
            assert not after[0][name].any(), name
        else:
            assert same_bytes(after[0][name], tensor), name
    assert all(same_bytes(after[1][name], tensor) for name, tensor in before[1].items())
