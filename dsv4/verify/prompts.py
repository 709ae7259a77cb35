"""One golden prompt on one pool: prefill inside and out, decode, chunkings, greedy continuation.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.verify.golden import StoredTensors
from dsv4.verify.report import EXACT, PLAIN, STORED, Check, Tolerance, compare, failed
from dsv4.verify.session import Session, VerifyOptions

PREFILL = "prefill."
PLAIN_NAMES = ("attn_out", "ffn_out", "logits")
MAX_PIECES = 12
"""Chunks of a random chunking: enough to cross windows and compression boundaries at odd places."""


class PromptCheck:
    """Compares every stored tensor of a prompt. `plain` is the same model without KV rounding."""

    def __init__(
        self,
        session: Session,
        stored: StoredTensors,
        options: VerifyOptions,
        plain: Session | None = None,
    ) -> None:
        self.session, self.stored, self.options, self.plain = session, stored, options, plain
        self.token_ids: list[int] = stored.take("input_ids")[0].tolist()

    def checks(self) -> Iterator[Check]:
        yield from self._prefill()
        yield from self._decode()
        yield from self._chunkings()
        if "greedy.ids" in self.stored:
            yield from self._greedy()
        if self.plain is not None and "plain.logits" in self.stored:
            logits_TV = self.plain.chunks(self.token_ids, [len(self.token_ids)])
            yield self._compare("plain.logits", logits_TV, PLAIN)
        for name in self.stored.untaken:
            yield failed(self.stored.subject, name, "unknown tensor, not checked")

    def _prefill(self) -> Iterator[Check]:
        num_tokens = len(self.token_ids)
        with self.session.traced() as trace, self.session.slot(num_tokens) as slot:
            logits_TV = self.session.forward(slot, self.token_ids, trace)
            values = {f"{PREFILL}{name}": value for name, value in trace.values.items()}
            values["prefill.logits"] = logits_TV
            if "final_norm.0" in trace.values:
                values["prefill.final_norm"] = trace.values["final_norm.0"]
            for name in self.stored.named(f"{PREFILL}compressed_kv."):
                num_entries = self._want(name).shape[0]
                values[name] = self.session.entries(slot, _layer(name), num_entries)
        for name in self.stored.named(PREFILL):
            if name in values:
                yield self._compare_prefill(name, values)

    def _compare_prefill(self, name: str, values: dict[str, Tensor]) -> Check:
        part = name.removeprefix(PREFILL).partition(".")[0]
        if part == "index_topk":
            return self._compare_selection(name, values[name])
        if part.startswith("route_"):
            return self._compare_routes(name, values)
        return self._compare(name, values[name], PLAIN if part in PLAIN_NAMES else STORED)

    def _compare_selection(self, name: str, got_TK: Tensor) -> Check:
        """As sets: both sides descending; a select buffer wider than the stored table holds only -1 there."""
        want_TK = self._want(name).sort(-1, descending=True).values
        surplus = got_TK[:, want_TK.shape[1] :]
        if surplus.numel() and bool((surplus >= 0).any()):
            return failed(self.stored.subject, name, "more entries selected than there are")
        got_TK = got_TK[:, : want_TK.shape[1]]
        return compare(self.stored.subject, name, got_TK, want_TK, EXACT)

    def _compare_routes(self, name: str, values: dict[str, Tensor]) -> Check:
        """As sets: indices and weights in ascending order of the expert."""
        kind, layer = name.removeprefix(PREFILL).rsplit(".", 1)
        indices = f"{PREFILL}route_indices.{layer}"
        got, want = values[name].cpu(), self._want(name)
        got = got.gather(-1, values[indices].cpu().argsort(-1))
        want = want.gather(-1, self._want(indices).argsort(-1))
        if kind == "route_indices":
            return compare(self.stored.subject, name, got.long(), want, EXACT)
        return compare(self.stored.subject, name, got, want, STORED)

    def _decode(self) -> Iterator[Check]:
        num_cached = int(self.stored.take("decode.prefill_len"))
        sizes = [num_cached] + [1] * (len(self.token_ids) - num_cached)
        logits_TV = self.session.chunks(self.token_ids, sizes)
        yield self._compare("decode.logits", logits_TV[num_cached:], PLAIN)

    def _chunkings(self) -> Iterator[Check]:
        """The stored sizes, then random ones; each must give the logits of the whole prompt."""
        whole_TV = self._want("prefill.logits")
        sizes = self.stored.take("chunked.sizes").tolist()
        stored_TV = self.session.chunks(self.token_ids, sizes)
        yield compare(self.stored.subject, "chunked.logits", stored_TV, whole_TV, PLAIN)
        chance = random.Random(f"{self.options.seed} {self.stored.subject}")
        for number in range(self.options.chunkings):
            sizes = random_sizes(len(self.token_ids), chance)
            logits_TV = self.session.chunks(self.token_ids, sizes)
            name = f"chunked.random{number}.logits"
            yield compare(self.stored.subject, name, logits_TV, whole_TV, PLAIN)

    def _greedy(self) -> Iterator[Check]:
        want = self._want("greedy.ids")
        with self.session.slot(len(self.token_ids) + want.shape[0]) as slot:
            logits_TV = self.session.forward(slot, self.token_ids)
            ids = [int(logits_TV[-1].argmax())]
            while len(ids) < want.shape[0]:
                ids.append(int(self.session.forward(slot, ids[-1:])[-1].argmax()))
        yield compare(self.stored.subject, "greedy.ids", torch.tensor(ids), want, EXACT)

    def _want(self, name: str) -> Tensor:
        """The stored value without its batch dim of 1, which routes do not have."""
        value = self.stored.take(name)
        return value if name.startswith(f"{PREFILL}route_") else value[0]

    def _compare(self, name: str, got: Tensor, tolerance: Tolerance) -> Check:
        return compare(self.stored.subject, name, got, self._want(name), tolerance)


def random_sizes(num_tokens: int, chance: random.Random) -> list[int]:
    """A random way to cut `num_tokens` into chunks of at least 1."""
    num_cuts = chance.randint(min(1, num_tokens - 1), min(MAX_PIECES, num_tokens) - 1)
    cuts = sorted(chance.sample(range(1, num_tokens), num_cuts))
    return [end - start for start, end in zip([0, *cuts], [*cuts, num_tokens], strict=True)]


def _layer(name: str) -> int:
    return int(name.rpartition(".")[2])
