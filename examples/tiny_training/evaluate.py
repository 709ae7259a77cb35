"""Recall and held-out loss through the dense forward. Legend: B sequences, S tokens of a sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv4.model.decoder import Decoder
from tiny_training.data import KEY_LENGTH, recall_prompt
from tiny_training.dense import DenseForward, DenseMode
from tiny_training.loss import token_losses
from tiny_training.regions import Regions


@torch.no_grad()
def recall(
    model: Decoder, text: np.ndarray, *, distance: int, trials: int, seed: int,
    sparse: bool = True, zero_entries: bool = False, batch: int = 8,
) -> float:  # fmt: skip
    """Share of trials whose four bytes are all the most likely ones, after a key `distance` tokens back.

    Feeding the right answer and asking for its bytes is greedy decoding: the first wrong byte fails the trial.
    """
    rng = np.random.default_rng(seed)
    drawn = [recall_prompt(text, rng, distance) for _ in range(trials)]
    longest = max(len(prompt) for prompt, _ in drawn) + KEY_LENGTH
    mode = DenseMode(sparse=sparse, drafts=False, zero_entries=zero_entries)
    forward = DenseForward(model, longest, mode, Regions())
    right = 0
    for first in range(0, trials, batch):
        some = drawn[first : first + batch]
        ids = torch.zeros(len(some), longest, dtype=torch.int64)
        for b, (prompt, key) in enumerate(some):
            ids[b, : len(prompt) + KEY_LENGTH] = torch.tensor([*prompt, *key])
        guesses = forward(ids.to(model.embed.device)).logits_BSV.argmax(-1).cpu()
        for b, (prompt, key) in enumerate(some):
            start = len(prompt) - 1
            right += guesses[b, start : start + KEY_LENGTH].tolist() == list(key)
    return right / trials


@torch.no_grad()
def bits_per_byte(
    model: Decoder, text: np.ndarray, *, num_tokens: int, num_sequences: int, sparse: bool = True
) -> tuple[float, float]:
    """(main, draft) loss on evenly spaced held-out crops, in bits."""
    forward = DenseForward(model, num_tokens, DenseMode(sparse=sparse), Regions())
    starts = np.linspace(0, len(text) - num_tokens - 1, num_sequences).astype(int)
    crops = np.stack([text[start : start + num_tokens] for start in starts])
    totals = torch.zeros(2)
    for part in torch.from_numpy(crops).long().split(8):
        ids = part.to(model.embed.device)
        output = forward(ids)
        losses = [token_losses(output.logits_BSV[:, :-1], ids[:, 1:])]
        if output.draft_logits_BSV is not None:
            losses.append(token_losses(output.draft_logits_BSV[:, :-2], ids[:, 2:]))
        totals[: len(losses)] += torch.stack([loss.mean(-1).sum().cpu() for loss in losses])
    main, draft = (totals / num_sequences / np.log(2)).tolist()
    return main, draft


@torch.no_grad()
def completion(model: Decoder, prompt: bytes, num_tokens: int) -> bytes:
    """Greedy continuation, the whole sequence recomputed for each byte."""
    ids = torch.zeros(1, len(prompt) + num_tokens, dtype=torch.int64, device=model.embed.device)
    ids[0, : len(prompt)] = torch.tensor(list(prompt))
    forward = DenseForward(model, ids.shape[1], DenseMode(drafts=False), Regions())
    for at in range(len(prompt), ids.shape[1]):
        best: Tensor = forward(ids).logits_BSV[0, at - 1].argmax()
        ids[0, at] = best
    return bytes(i for i in ids[0, len(prompt) :].tolist() if i < 256)
