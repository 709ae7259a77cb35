"""With official KV rounding and deterministic mode, pool family and row format leave no trace in the logits."""

from __future__ import annotations

import pytest
import torch

import dsv4
from tests import run_on

STEPS = 300
PROMPT = '''def ring_row(slot, position, ring_rows):
    """Row of a window ring that holds the KV of a position."""
    return slot * ring_rows + position % ring_rows


class Ring:
    def __init__(self, rows):
        self.rows = [None] * rows

    def store(self, position, value):
'''


def decode(pool: dsv4.PoolConfig, tokens: list[int] | None) -> tuple[list[int], torch.Tensor]:
    """Greedy ids (or the given ones, teacher forced) and the logits of every step."""
    config = dsv4.BackendConfig(
        pool=pool, kernels=run_on.KERNELS, deterministic=True, max_batch_tokens=512
    )
    model = dsv4.load("tiny", backend=config, device=run_on.DEVICE)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode(PROMPT)
    memory = model.backend.pool
    slot = memory.acquire()
    memory.reserve(slot, len(prompt) + STEPS + 1)
    ids, rows = [], []
    new = prompt
    for step in range(STEPS):
        logits = model.forward(dsv4.ForwardBatch.of([(slot, new)]))[0]
        memory.commit(slot, len(new))
        rows.append(logits)
        ids.append(int(logits.argmax()) if tokens is None else tokens[step])
        new = ids[-1:]
    return ids, torch.stack(rows)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], torch.Tensor]:
    pool = dsv4.UnifiedPoolConfig(
        max_requests=2, max_context=1024, row_format="bf16", index_format="bf16"
    )
    return decode(pool, None)


@pytest.mark.parametrize(
    ("pool", "row_format", "index_format"),
    [
        (dsv4.UnifiedPoolConfig, "fp8", "fp4"),
        (dsv4.ThreePoolConfig, "bf16", "bf16"),
        (dsv4.ThreePoolConfig, "fp8", "fp4"),
    ],
)
def test_300_steps_are_bit_identical_in_every_pool_and_official_row_format(
    expected, pool, row_format, index_format
):
    ids, logits = expected
    _, other = decode(
        pool(max_requests=2, max_context=1024, row_format=row_format, index_format=index_format),
        ids,
    )
    assert torch.equal(logits, other)
    assert logits.std() > 0.5  # a constant would agree with anything
