"""Decoding by hand, with slots that the caller owns: what an engine does between two steps.

    python examples/decode.py [CHECKPOINT_FOLDER]

A slot is a request's identity in the pool. It is acquired, holds as many committed tokens as its length says, may be
forked or rolled back, and is released. Legend: B slots of a forward, T tokens of a forward, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import dsv4
from dsv4.errors import CheckpointError, Dsv4Error

DEPTH = 12
"""Drafted tokens; the pool stores 1 + DEPTH of a slot in place, and can roll as many back."""


class ByHand:
    """Slots, the text of each, and its next token."""

    def __init__(self, model: dsv4.Model) -> None:
        if model.tokenizer is None:
            raise CheckpointError("checkpoint: has no tokenizer, this example needs text")
        self.model, self.tokenizer = model, model.tokenizer
        self.engine = dsv4.Engine(model)
        self.pool = self.engine.pool
        self.text: dict[int, list[int]] = {}
        """Token ids that the slot has processed."""
        self.next: dict[int, int] = {}
        """The token that comes behind them; no forward has seen it."""

    def start(self, prompt: str) -> int:
        """Prefill a prompt into a slot of its own, in as many forwards as its length takes."""
        slot = self.pool.acquire()
        self.text[slot] = self.tokenizer.encode(prompt)
        self.next[slot] = greedy(self.engine.prefill(slot, self.text[slot]))[0]
        return slot

    def step(self) -> None:
        """One forward: the next token of every slot."""
        slots = list(self.next)
        logits_BV = self.engine.decode(slots, [self.next[slot] for slot in slots])
        self.accept(slots, greedy(logits_BV))

    def accept(self, slots: Sequence[int], chosen: Sequence[int]) -> None:
        for slot, token_id in zip(slots, chosen, strict=True):
            self.text[slot].append(self.next[slot])
            self.next[slot] = token_id

    def join(self, prompt: str) -> int:
        """A request joins those that decode: its whole prompt and their next tokens in one forward.

        `model.forward` writes rows and moves no length: the rows count once the caller commits them.
        """
        decoding, slot = list(self.next), self.pool.acquire()
        work = [(other, [self.next[other]]) for other in decoding]
        work.append((slot, self.tokenizer.encode(prompt)))
        for owner, token_ids in work:
            self.pool.reserve(owner, self.pool.length(owner) + len(token_ids))
        *chosen, self.next[slot] = greedy(self.model.forward(dsv4.ForwardBatch.of(work)))
        for owner, token_ids in work:
            self.pool.commit(owner, len(token_ids))
        self.text[slot] = list(work[-1][1])
        self.accept(decoding, chosen)
        return slot

    def fork(self, source: int, addition: str) -> int:
        """A slot that shares the full pages of its source, and goes on with other text."""
        slot = self.pool.fork(source)
        token_ids = self.tokenizer.encode(addition)
        self.next[slot] = greedy(self.engine.prefill(slot, token_ids))[0]
        self.text[slot] = [*self.text[source], *token_ids]
        return slot

    def verify(self, slot: int, draft_ids: Sequence[int]) -> int:
        """Process the next token and a draft in one forward; keep the part of the draft that is what decoding
        token by token would have chosen. Returns how many tokens that is."""
        token_ids = [self.next[slot], *draft_ids]
        self.pool.reserve(slot, self.pool.length(slot) + len(token_ids))
        batch = dsv4.ForwardBatch.of([(slot, token_ids)])
        chosen = greedy(self.model.forward(batch, rows="all"))
        agree = [a == b for a, b in zip(draft_ids, chosen, strict=False)]
        num_kept = [*agree, False].index(False)
        # Rows behind the kept tokens were never committed: nothing sees them, the next forward overwrites them.
        self.pool.commit(slot, 1 + num_kept)
        self.text[slot] += token_ids[: 1 + num_kept]
        self.next[slot] = chosen[num_kept]
        return num_kept


def greedy(logits_BV: Tensor) -> list[int]:
    """The most probable token of each row."""
    return logits_BV.argmax(dim=-1).tolist()


def decode(checkpoint: str) -> None:
    pool_config = dsv4.UnifiedPoolConfig(
        max_requests=3, max_context=1024, in_place_tokens=1 + DEPTH
    )
    # Deterministic: a token's logits are the same to the last bit, however many tokens share its forward.
    backend = dsv4.BackendConfig(pool=pool_config, deterministic=True)
    hand = ByHand(dsv4.load(checkpoint, backend=backend))
    pool = hand.pool

    first = hand.start("class Stack:\n    def push(self, item):\n")
    for _ in range(8):
        hand.step()
    print(f"slot {first} decodes alone and holds {pool.length(first)} tokens")
    second = hand.join("import os\nimport sys\n\n\ndef main():\n")
    print(f"slot {second} joined with a prompt of {pool.length(second)} tokens in the same forward")
    third = hand.fork(second, "    #")
    print(f"slot {third} is a fork of slot {second} and holds {pool.length(third)} tokens")
    for _ in range(40):
        hand.step()
    for slot, token_ids in hand.text.items():
        print(f"--- slot {slot}, {pool.length(slot)} tokens\n{hand.tokenizer.decode(token_ids)}")

    # The draft is what the slot decoded, after it was rolled back: all of it must be accepted.
    length = pool.length(first)
    draft_ids = hand.text[first][-DEPTH:]
    pool.rollback(first, length - DEPTH)
    print(f"--- slot {first} rolled back from {length} tokens to {pool.length(first)}")
    del hand.text[first][-DEPTH:]
    hand.next[first], *draft_ids = draft_ids
    num_kept = hand.verify(first, draft_ids)
    print(f"{num_kept} of {len(draft_ids)} drafted tokens kept, {pool.length(first)} tokens again")
    for slot in hand.text:
        pool.release(slot)


def main(argv: Sequence[str]) -> int:
    """0, or 2 with one line on stderr if the checkpoint cannot be used."""
    # Operations this small only wait for other threads, and far longer on a busy machine.
    torch.set_num_threads(1)
    try:
        decode(argv[0] if argv else "tiny")
    except Dsv4Error as error:
        print(f"decode: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
