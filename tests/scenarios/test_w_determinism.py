"""Class W: in deterministic mode the bits of a row do not depend on the rows beside it."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4.config import PoolConfig
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_decoder


@scenario("W", 80)
@pytest.mark.parametrize("kv_quant", ["none", "official"])
def test_a_decode_row_has_the_same_bits_in_batches_of_any_size(
    family: type[PoolConfig], kv_quant: str
) -> None:
    decoder = tiny_decoder(kv_quant=kv_quant)
    sequence = truth(64, decoder=decoder)
    session = Session(family, decoder, slots=64, context=64, deterministic=True)
    slots = session.open_all(64)
    lengths = [1 + (11 * slot) % 50 for slot in slots]
    for slot, n in zip(slots, lengths, strict=True):
        session.feed_one(slot, sequence.ids[:n])
    alone = [
        session.forward([(s, [sequence.ids[n]])])[0] for s, n in zip(slots, lengths, strict=True)
    ]
    rng = random.Random(0)
    for size in (2, 7, 16, 64):
        for _ in range(3):
            chosen = rng.sample(slots, size)
            batch = [(s, [sequence.ids[lengths[s]]]) for s in chosen]
            for slot, rows in zip(chosen, session.forward(batch), strict=True):
                assert torch.equal(rows, alone[slot])
    if kv_quant == "none":
        for rows, n in zip(alone, lengths, strict=True):
            assert_same(rows[0], sequence.logits[n])
