"""What one forward works on: which slots, how many new tokens each, and the token ids."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from dsv4.errors import BatchError


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


@frozen(kw_only=True)
class ForwardBatch:
    """Ragged requests, packed: request b owns `query_lengths[b]` consecutive tokens.

    There are no modes: decode is a length of 1, verify 1 + d, a prefill chunk more, idle 0; any mixture is legal.
    A slot of -1 is padding: its tokens produce zeros and store nothing. Tokens behind the last request's (up to
    `num_tokens`) are padding too.
    """

    slots: tuple[int, ...] = field(converter=_ints)
    """One per request; -1 = no request. A live slot may appear once."""
    query_lengths: tuple[int, ...] = field(converter=_ints)
    token_ids: tuple[int, ...] = field(converter=_ints)
    """sum(query_lengths) ids, request after request."""
    num_tokens: int = field()
    """Tokens including padding behind the last request."""

    @num_tokens.default
    def _packed(self) -> int:
        return sum(self.query_lengths)

    def __attrs_post_init__(self) -> None:
        problems = []
        if len(self.slots) != len(self.query_lengths):
            problems.append(f"{len(self.slots)} slots but {len(self.query_lengths)} query_lengths")
        if any(n < 0 for n in self.query_lengths):
            problems.append(f"query_lengths {self.query_lengths} must be >= 0")
        if len(self.token_ids) != sum(self.query_lengths):
            problems.append(
                f"{len(self.token_ids)} token_ids but query_lengths sum to {sum(self.query_lengths)}"
            )
        if self.num_tokens < sum(self.query_lengths):
            problems.append(
                f"num_tokens {self.num_tokens} is below the {sum(self.query_lengths)} tokens of the requests"
            )
        live = [s for s in self.slots if s >= 0]
        if len(set(live)) != len(live):
            problems.append(f"slots {self.slots} name a slot twice")
        if problems:
            raise BatchError("forward batch: " + "; ".join(problems))

    @classmethod
    def of(cls, tokens_by_slot: Sequence[tuple[int, Sequence[int]]]) -> ForwardBatch:
        """A batch from (slot, new token ids) pairs."""
        return cls(
            slots=[slot for slot, _ in tokens_by_slot],
            query_lengths=[len(ids) for _, ids in tokens_by_slot],
            token_ids=[i for _, ids in tokens_by_slot for i in ids],
        )

    def padded(self, *, num_tokens: int, num_requests: int | None = None) -> ForwardBatch:
        """The same batch in a larger bucket: idle -1 requests and padding tokens at the end."""
        extra = max(0, (num_requests or 0) - len(self.slots))
        return ForwardBatch(
            slots=self.slots + (-1,) * extra,
            query_lengths=self.query_lengths + (0,) * extra,
            token_ids=self.token_ids,
            num_tokens=num_tokens,
        )

    @property
    def last_rows(self) -> tuple[int, ...]:
        """Token row of each request's newest token; -1 for an idle request."""
        rows, end = [], 0
        for n in self.query_lengths:
            end += n
            rows.append(end - 1 if n else -1)
        return tuple(rows)


@frozen(kw_only=True)
class BatchShape:
    """Everything about a batch that may decide a shape, a stride or a branch. Under graph capture these are the
    bucket's capacities; eagerly they are the batch's own numbers. Tensors never decide a shape."""

    num_tokens: int
    num_requests: int
    max_query_tokens: int
    """Upper bound of the query lengths; chunks (fresh rows, tail stores) exist only where it exceeds D."""
    max_length: int
    """Upper bound of length + query length over the requests."""
    query_lengths: tuple[int, ...] = ()
    """The host's query lengths: lets a reference kernel walk requests without asking the device."""
    lengths: tuple[int, ...] | None = None
    """The host's committed lengths, where they are known to be the device's (no `advance` is pending)."""

    def max_closing(self, ratio: int) -> int:
        """Most windows of `ratio` that can close in this forward."""
        if self.lengths is not None:
            spans = zip(self.lengths, self.query_lengths, strict=True)
            return sum((length + n) // ratio - length // ratio for length, n in spans)
        return (self.num_tokens + self.num_requests * (ratio - 1)) // ratio

    def max_entries(self, ratio: int) -> int:
        """Most entries of `ratio` that any token can see."""
        return self.max_length // ratio

    def fold_steps(self, ratio: int, in_place_tokens: int) -> int:
        """Most tokens that one fold segment takes, never more than a window: an accumulator takes as many as arrive, a
        closing window also the D raw rows before them."""
        raw = in_place_tokens if self.max_closing(ratio) else 0
        return min(ratio, raw + self.max_query_tokens)
