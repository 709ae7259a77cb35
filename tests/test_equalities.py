"""What must be equal: a request alone or among others, in one piece or many, in either pool and exact row format."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4.config import ModelConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.model.checkpoint import load_weights
from dsv4.model.decoder import Decoder
from tests.scenarios.harness import Session
from tests.scenarios.weights import KINDS, random_decoder, tiny_decoder, tiny_document

GOLDEN = Path(__file__).parent / "data" / "golden"
FOLDERS = ("tiny", "pubrates", "quant/qat")
TOLERANCE = 1e-5
"""Between two orders of the same fp32 sums; logits have a variance of about one."""
ORACLE_TOLERANCE = 5e-5
families = pytest.mark.parametrize("family", [UnifiedPoolConfig, ThreePoolConfig])
folders = pytest.mark.parametrize("folder", FOLDERS)
modes = pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])


@functools.cache
def golden_decoder(folder: str) -> Decoder:
    decoder = Decoder(ModelConfig.from_json(GOLDEN / folder / "config.json"))
    load_weights(decoder, GOLDEN / folder / "weights.safetensors")
    return decoder


@functools.cache
def golden_prompts(folder: str) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
    """(token ids, golden logits [S, V]) of every prompt."""
    found = []
    for file in sorted((GOLDEN / folder).glob("prompt*.safetensors")):
        stored = load_file(file)
        found.append((tuple(stored["input_ids"][0].tolist()), stored["prefill.logits"][0]))
    return tuple(found)


def open_session(
    family: type[PoolConfig], folder: str, deterministic: bool, *, depth: int = 1, slots: int = 8
) -> Session:
    return Session(
        family,
        golden_decoder(folder),
        slots=slots,
        context=512,
        page=128,
        depth=depth,
        deterministic=deterministic,
        max_tokens=1024,
    )


@functools.cache
def alone(family: type[PoolConfig], folder: str, deterministic: bool) -> tuple[Tensor, ...]:
    """Every prompt by itself in a pool of its own, in one piece."""
    results = []
    for ids, _ in golden_prompts(folder):
        session = open_session(family, folder, deterministic, slots=1)
        results.append(session.feed_one(session.open(), ids))
    return tuple(results)


def check(
    got: Sequence[Tensor], family: type[PoolConfig], folder: str, deterministic: bool
) -> None:
    """Equal to each alone: to the last bit in deterministic mode; and to the golden numbers."""
    wanted = alone(family, folder, deterministic)
    for rows, single, (_, stored) in zip(got, wanted, golden_prompts(folder), strict=True):
        if deterministic:
            assert torch.equal(rows, single)
        torch.testing.assert_close(rows, single, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(rows, stored, atol=ORACLE_TOLERANCE, rtol=0)


@families
@folders
@modes
def test_all_prompts_as_one_ragged_batch_equal_each_alone(
    family: type[PoolConfig], folder: str, deterministic: bool
) -> None:
    """Slots permuted, idle requests between them, padding tokens behind them."""
    session = open_session(family, folder, deterministic)
    slots = session.open_all(8)
    random.Random(folder).shuffle(slots)
    prompts = [ids for ids, _ in golden_prompts(folder)]
    mine = slots[: len(prompts)]
    requests: list[tuple[int, Sequence[int]]] = [(slots[-1], [])]
    for slot, ids in zip(mine, prompts, strict=True):
        requests += [(slot, ids), (-1, [])] if len(requests) < 5 else [(slot, ids)]
    logits = session.feed(requests, pad_tokens=5)
    by_slot = {slot: rows for (slot, _), rows in zip(requests, logits, strict=True)}
    check([by_slot[slot] for slot in mine], family, folder, deterministic)
    session.assert_guards_intact()


@families
@folders
@modes
def test_prefill_and_decode_mixed_in_one_forward_equal_each_alone(
    family: type[PoolConfig], folder: str, deterministic: bool
) -> None:
    """Each forward gives each request one token, a few in place, a chunk, or nothing; order and padding vary."""
    rng = random.Random(folder)
    session = open_session(family, folder, deterministic, depth=3)
    prompts = [ids for ids, _ in golden_prompts(folder)]
    slots = rng.sample(session.open_all(8), len(prompts))
    at, parts = [0] * len(prompts), [[] for _ in prompts]
    while any(n < len(ids) for n, ids in zip(at, prompts, strict=True)):
        order = rng.sample(range(len(prompts)), len(prompts))
        requests = []
        for which in order:
            count = rng.choice([0, 1, 1, 2, 3, 7, 40])
            requests.append((slots[which], prompts[which][at[which] : at[which] + count]))
        pads = rng.choice([0, 1, 6])
        logits = session.feed(requests, pad_tokens=pads, pad_requests=min(pads, 2))
        for which, rows in zip(order, logits, strict=True):
            parts[which].append(rows)
            at[which] += len(rows)
    check([torch.cat(rows) for rows in parts], family, folder, deterministic)
    session.assert_guards_intact()


@families
@folders
def test_decode_chunks_and_one_shot_have_the_same_bits(
    family: type[PoolConfig], folder: str
) -> None:
    """All prompts side by side: token by token after one chunk, in chunks of odd sizes, and in one piece."""
    prompts = [ids for ids, _ in golden_prompts(folder)]
    for sizes in ([1], [2, 1, 3], [16, 5, 33], [64], [97, 1, 1, 1]):
        session = open_session(family, folder, True, depth=2)
        slots = session.open_all(len(prompts))
        parts: list[list[Tensor]] = [[] for _ in prompts]
        at, longest = 0, max(map(len, prompts))
        for size in itertools.cycle(sizes):
            if at >= longest:
                break
            requests = [(s, ids[at : at + size]) for s, ids in zip(slots, prompts, strict=True)]
            for rows, part in zip(session.feed(requests), parts, strict=True):
                part.append(rows)
            at += size
        check([torch.cat(rows) for rows in parts], family, folder, True)


@families
@pytest.mark.parametrize("row_format", ["bf16", "fp8"])
@pytest.mark.parametrize("kv_quant", ["none", "official"])
def test_rounded_rows_give_decode_chunks_and_one_shot_the_same_bits(
    family: type[PoolConfig], row_format: str, kv_quant: str
) -> None:
    """A chunk attends its own tokens as they will be read back, so it makes no difference when they were stored."""
    decoder, ids = tiny_decoder(kv_quant=kv_quant), [(7 * i + 2) % 61 for i in range(70)]
    runs = []
    for sizes in ([70], [1] * 70, [33, 3, 1, 2, 31], [3] * 23 + [1]):
        session = Session(
            family, decoder, deterministic=True, depth=3, row_format=row_format, index_format="bf16"
        )
        slot, ends = session.open(), [0, *itertools.accumulate(sizes)]
        runs.append(
            torch.cat([session.feed_one(slot, ids[a:b]) for a, b in itertools.pairwise(ends)])
        )
    for run in runs[1:]:
        assert torch.equal(run, runs[0])


@families
@folders
def test_a_reused_slot_gives_the_bits_of_a_fresh_pool(
    family: type[PoolConfig], folder: str
) -> None:
    """One slot, every prompt twice, longest first, so that each finds rows of a longer one."""
    session = open_session(family, folder, True, slots=1)
    wanted = alone(family, folder, True)
    order = sorted(range(len(wanted)), key=lambda i: -len(wanted[i]))
    for which in order + order:
        slot = session.open()
        rows = session.feed_one(slot, golden_prompts(folder)[which][0])
        assert torch.equal(rows, wanted[which])
        session.pool.release(slot)


@folders
@modes
def test_both_pools_give_the_same_bits(folder: str, deterministic: bool) -> None:
    """They differ in addresses only, so this needs no deterministic mode."""
    both = zip(
        alone(UnifiedPoolConfig, folder, deterministic),
        alone(ThreePoolConfig, folder, deterministic),
        strict=True,
    )
    for unified, three in both:
        assert torch.equal(unified, three)


@families
def test_a_decode_row_has_the_same_bits_in_batches_of_1_2_7_and_16(
    family: type[PoolConfig],
) -> None:
    folder, rng = "quant/qat", random.Random(16)
    session = open_session(family, folder, True, slots=16)
    ids = golden_prompts(folder)[1][0]
    slots = session.open_all(16)
    for slot in slots:
        session.feed_one(slot, ids[: 3 * slot + 1])
    single = {s: session.forward([(s, [ids[3 * s + 1]])])[0] for s in slots}
    for size in (1, 2, 7, 16):
        chosen = rng.sample(slots, size)
        logits = session.forward([(s, [ids[3 * s + 1]]) for s in chosen])
        for slot, rows in zip(chosen, logits, strict=True):
            assert torch.equal(rows, single[slot])


def exact_decoder(name: str) -> Decoder:
    """Models with official rounding whose nope width is a block of 64: the golden one, and a deeper random one."""
    if name == "golden":
        return golden_decoder("quant/qat")
    document = tiny_document(
        num_hidden_layers=5,
        layer_types=[KINDS[0], KINDS[4], KINDS[16], KINDS[4], KINDS[16]],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe", "moe"],
        head_dim=80,
        index_topk=5,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        kv_quant="official",
    )
    return random_decoder(ModelConfig.from_json(document), 9)


@pytest.mark.parametrize("name", ["golden", "random"])
def test_pools_and_exact_formats_decode_bit_for_bit_alike(name: str) -> None:
    """{unified, three-pool} x {bf16, packed fp8 rows} x {bf16, fp4 keys}: two prompts, 40 greedy steps each."""
    decoder, runs = exact_decoder(name), []
    prompts = [[(5 * i + 3) % 61 for i in range(n)] for n in (45, 13)]
    for family, rows, keys in itertools.product(
        (UnifiedPoolConfig, ThreePoolConfig), ("bf16", "fp8"), ("bf16", "fp4")
    ):
        session = Session(family, decoder, deterministic=True, row_format=rows, index_format=keys)
        slots = session.open_all(2)
        logits = session.feed(list(zip(slots, prompts, strict=True)))
        steps = [torch.cat(logits)]
        for _ in range(40):
            newest = [int(part[-1].argmax()) for part in logits]
            logits = session.feed([(s, [token]) for s, token in zip(slots, newest, strict=True)])
            steps.append(torch.cat(logits))
        runs.append(torch.cat(steps))
    assert runs[0].isfinite().all()
    for run in runs[1:]:
        assert torch.equal(run, runs[0])
    tokens = runs[0][-80:].argmax(-1)
    assert len(set(tokens.tolist())) > 5, "the greedy text is not a constant"
