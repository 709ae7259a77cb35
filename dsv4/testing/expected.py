"""What a forward's metadata must be, by plain loops over tokens: the address laws of dsv4/pool/geometry.py's docstring
written out by hand, from a pool's sizes, lengths and block table.

Rows are ints, -1 = no row.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import KVPool


@frozen(kw_only=True)
class Sizes:
    """The numbers that addresses are made of."""

    max_requests: int
    window: int
    ring_rows: int
    margin: int
    """D, in_place_tokens."""
    page_tokens: int
    entry_base: int


@frozen(kw_only=True)
class Token:
    """One token of a forward; slot -1 = padding."""

    index: int
    request: int
    slot: int
    position: int
    length: int
    """Committed tokens of its slot."""
    query_length: int
    from_end: int
    """Tokens of its request from this one to the last, itself included."""


@frozen(kw_only=True)
class Closing:
    """A window whose last token is one of this forward's."""

    request: int
    entry: int


class ExpectedForward:
    """The metadata of one batch, from the committed lengths and the block table."""

    def __init__(
        self,
        batch: ForwardBatch,
        *,
        model: ModelConfig,
        sizes: Sizes,
        lengths_by_slot: Sequence[int],
        pages: Sequence[Sequence[int]],
    ) -> None:
        """`pages`: the block table, a row per slot."""
        self.batch, self.model, self.sizes, self.pages = batch, model, sizes, pages
        self.lengths = [lengths_by_slot[slot] if slot >= 0 else 0 for slot in batch.slots]
        self.starts = [sum(batch.query_lengths[:b]) for b in range(len(batch.slots))]
        self.tokens = self._tokens()

    @classmethod
    def on(cls, pool: KVPool, batch: ForwardBatch) -> ExpectedForward:
        """On a pool, as of its lengths and block table now."""
        geometry = pool.geometry
        sizes = Sizes(
            max_requests=geometry.max_requests,
            window=geometry.window,
            ring_rows=geometry.ring_rows,
            margin=geometry.in_place_tokens,
            page_tokens=geometry.page_tokens,
            entry_base=geometry.entry_base,
        )
        return cls(
            batch,
            model=pool.model,
            sizes=sizes,
            lengths_by_slot=pool.lengths.tolist(),
            pages=pool.block_table.tolist(),
        )

    def _tokens(self) -> list[Token]:
        tokens: list[Token] = []
        for request, num in enumerate(self.batch.query_lengths):
            slot, length = self.batch.slots[request], self.lengths[request]
            for local in range(num):
                tokens.append(
                    Token(
                        index=len(tokens),
                        request=request,
                        slot=slot,
                        position=length + local if slot >= 0 else 0,
                        length=length,
                        query_length=num,
                        from_end=num - local,
                    )
                )
        for index in range(len(tokens), self.batch.num_tokens):
            nobody = len(self.batch.slots)
            tokens.append(
                Token(
                    index=index, request=nobody, slot=-1, position=0, length=0, query_length=0, from_end=0
                )
            )  # fmt: skip
        return tokens

    # windows

    @property
    def window_rows(self) -> int:
        return self.sizes.max_requests * self.sizes.ring_rows

    def fresh(self, token: Token) -> bool:
        """Whether the token belongs to a chunk, which is stored after attend."""
        return token.slot >= 0 and token.query_length > self.sizes.margin

    def ring_row(self, slot: int, position: int) -> int:
        return slot * self.sizes.ring_rows + position % self.sizes.ring_rows

    def swa_loc(self) -> list[int]:
        return [
            self.ring_row(t.slot, t.position)
            if t.slot >= 0 and t.from_end <= self.sizes.ring_rows
            else -1
            for t in self.tokens
        ]

    def store_loc(self) -> list[int]:
        return [
            -1 if self.fresh(t) else row for t, row in zip(self.tokens, self.swa_loc(), strict=True)
        ]

    def tail_loc(self) -> list[int]:
        return [
            row if self.fresh(t) else -1 for t, row in zip(self.tokens, self.swa_loc(), strict=True)
        ]

    def window_list(self, token: Token) -> list[int]:
        """Rows of the token's window in position order; own tokens of a chunk are fresh rows."""
        rows: list[int] = []
        if token.slot >= 0:
            for p in range(max(0, token.position + 1 - self.sizes.window), token.position + 1):
                if self.fresh(token) and p >= token.length:
                    rows.append(self.window_rows + token.index - (token.position - p))
                else:
                    rows.append(self.ring_row(token.slot, p))
        return rows

    # entries

    @staticmethod
    def visible(token: Token, ratio: int) -> int:
        return (token.position + 1) // ratio if token.slot >= 0 else 0

    def entry_row(self, slot: int, entry: int, ratio: int, *, base: int | None = None) -> int:
        """Row of an entry (or, with base 0, of an index key)."""
        per_page = self.sizes.page_tokens // ratio
        page = self.pages[slot][entry // per_page]
        assert page >= 0, f"slot {slot} has no page for entry {entry}"
        return (
            (self.sizes.entry_base if base is None else base) + page * per_page + entry % per_page
        )

    def entry_list(self, token: Token, ratio: int) -> list[int]:
        return [self.entry_row(token.slot, e, ratio) for e in range(self.visible(token, ratio))]

    def closing(self, ratio: int) -> list[Closing]:
        """Windows that close, request by request, in entry order."""
        found: list[Closing] = []
        for t in self.tokens:
            if t.slot >= 0 and (t.position + 1) % ratio == 0:
                found.append(Closing(request=t.request, entry=t.position // ratio))
        return found

    def entry_locs(self, ratio: int, *, base: int | None = None) -> list[int]:
        return [
            self.entry_row(self.batch.slots[c.request], c.entry, ratio, base=base)
            for c in self.closing(ratio)
        ]

    # state

    def _source(self, request: int, position: int, ring_rows: int) -> int:
        """Where a token's raw row is: in the state ring, or behind it if it is one of this forward's."""
        if position < 0:
            return -1
        local = position - self.lengths[request]
        if local >= 0:
            return self.sizes.max_requests * ring_rows + self.starts[request] + local
        return self.batch.slots[request] * ring_rows + position % ring_rows

    def state_loc(self, kind: LayerKind, ratio: int) -> list[int]:
        ring = self.state_rows(kind, ratio)
        return [
            t.slot * ring + t.position % ring if t.slot >= 0 and t.from_end <= ring else -1
            for t in self.tokens
        ]

    def state_rows(self, kind: LayerKind, ratio: int) -> int:
        overlap = 2 * ratio + self.sizes.margin - 1
        return overlap if kind is LayerKind.CSA else self.sizes.margin

    def overlap_sources(self, ratio: int) -> list[list[int]]:
        """Raw rows of the window before and the own one, for each closing window."""
        ring = self.state_rows(LayerKind.CSA, ratio)
        return [
            [self._source(c.request, p, ring) for p in _window_pair(c.entry, ratio)]
            for c in self.closing(ratio)
        ]

    def fold_segments(self, ratio: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """(accumulator row, first token of the window, [(position, raw row)]) of each closing window, then of each
        request's accumulator; positions from the oldest that the accumulator may still lack."""
        ranges = [(c.request, ratio * c.entry, ratio * (c.entry + 1)) for c in self.closing(ratio)]
        for request in range(len(self.batch.slots)):
            folded = self.folded(request)
            ranges.append((request, ratio * (folded // ratio), folded))
        segments = []
        for request, start, end in ranges:
            slot, length = self.batch.slots[request], self.lengths[request]
            first = max(start, length - self.sizes.margin)
            places = range(first, end) if slot >= 0 else range(0)
            lanes = [(p, self._source(request, p, self.sizes.margin)) for p in places]
            segments.append((slot, start, lanes))
        return segments

    def folded(self, request: int) -> int:
        """Tokens that no rollback can reach after this forward."""
        end = self.lengths[request] + self.batch.query_lengths[request]
        return max(0, end - self.sizes.margin)

    def accumulator_loc(self) -> list[int]:
        pairs = zip(self.batch.slots, self.batch.query_lengths, strict=True)
        return [slot if slot >= 0 and num else -1 for slot, num in pairs]

    def last_rows(self) -> list[int]:
        pairs = zip(self.starts, self.batch.query_lengths, strict=True)
        return [start + num - 1 if num else -1 for start, num in pairs]


def _window_pair(entry: int, ratio: int) -> range:
    return range(ratio * (entry - 1), ratio * (entry + 1))


def prefix_sums(lists: Sequence[Sequence[int]]) -> list[int]:
    """Starts of the lists in one stream, and its end."""
    sums = [0]
    for one in lists:
        sums.append(sums[-1] + len(one))
    return sums
