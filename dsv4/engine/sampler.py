"""Choosing the next token from logits.

Logits are vectors [V] over the vocabulary. Each request is sampled by itself with its own generator, so
a result never depends on batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True)
class TokenLogprob:
    """Natural-log probability of a generated token under the model, before temperature and top-p."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable (token id, logprob), best first; of equal ones the lower id comes first."""


@frozen(kw_only=True)
class Sample:
    """One generated token."""

    token_id: int
    logprob: TokenLogprob | None


class RequestSampler:
    """The sampling state of one request: its settings and its random numbers."""

    def __init__(
        self, *, temperature: float, top_p: float, seed: int | None, logprobs: int
    ) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.logprobs = logprobs
        self._generator: torch.Generator | None = None
        if temperature > 0:
            # On the CPU for every device: a seed means the same samples everywhere.
            self._generator = torch.Generator()
            if seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(seed)

    def choose(self, logits: Tensor) -> Tensor:
        """Token id (int64 scalar on the logits' device) for logits [V]; draws one number if sampling."""
        if self._generator is None:
            return logits.argmax()
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64).item()
        return draw(logits, uniform, temperature=self.temperature, top_p=self.top_p)

    def describe(self, logits: Tensor, token_id: int) -> TokenLogprob | None:
        """The log-probabilities that the request asked for, from logits [V]."""
        if not self.logprobs:
            return None
        logprobs = torch.log_softmax(logits.double(), dim=0)
        ranked, ids = logprobs.sort(descending=True, stable=True)
        top = zip(ids[: self.logprobs].tolist(), ranked[: self.logprobs].tolist(), strict=True)
        return TokenLogprob(token_id=token_id, logprob=float(logprobs[token_id]), top=tuple(top))


def draw(logits: Tensor, uniform: float, *, temperature: float, top_p: float) -> Tensor:
    """Inverse-CDF sample of softmax(logits / temperature) cut to its top-p nucleus.

    Logits [V]; `uniform` in [0, 1). The nucleus is the shortest run of most probable tokens whose mass
    reaches top_p; equal probabilities rank by token id.
    """
    logits = logits.double()
    # The maximum goes first: the tiniest temperature then cannot make inf - inf.
    probs = torch.softmax((logits - logits.max()) / temperature, dim=0)
    ranked, ids = probs.sort(descending=True, stable=True)
    mass = ranked.cumsum(dim=0)
    last = (mass[:-1] < top_p).sum()
    # Strictly greater, so that a token of probability 0 is never chosen, not even by uniform = 0.
    rank = (mass <= uniform * mass[last]).sum()
    return ids[torch.minimum(rank, last)]


def sample(rows: Sequence[tuple[RequestSampler, Tensor]]) -> list[Sample]:
    """One token for each (sampler, logits [V]), with one wait for the device unless log-probabilities are
    asked for."""
    if not rows:
        return []
    chosen = torch.stack([sampler.choose(logits) for sampler, logits in rows]).tolist()
    return [
        Sample(token_id=token_id, logprob=sampler.describe(logits, token_id))
        for (sampler, logits), token_id in zip(rows, chosen, strict=True)
    ]
