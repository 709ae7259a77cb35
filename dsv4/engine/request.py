"""A generation request, what it yields, and the record the engine keeps of it while it lives."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Sequence

from attrs import define, field, frozen

from dsv4.engine.sampler import RequestSampler, TokenLogprob
from dsv4.engine.text import TextStream
from dsv4.errors import RequestError

SEED_LIMIT = 2**63  # torch.Generator takes 64-bit seeds, the upper half as negative numbers


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    """max_new_tokens were generated."""
    STOP = "stop"
    """A stop string or a stop token appeared."""
    EOS = "eos"
    """The model ended its text."""
    CANCELLED = "cancelled"
    """The caller gave up, or a forward failed; then `error` says how."""
    REJECTED = "rejected"
    """It never ran; `error` says why."""


def as_token_ids(values: Iterable[int]) -> tuple[int, ...]:
    """The ids as ints; RequestError if one is none."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise RequestError(
            f"token ids must be integers: {error}; give a list of ids, or text as a str"
        ) from None


# Converters leave alone what they cannot convert: the checks of Request name it, with all other bad values.


def _texts(values: str | Iterable[str]) -> tuple[str, ...]:
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return tuple(values) if several else (values,)  # type: ignore[return-value]


def _whole(value: object) -> object:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value


def _real(value: object) -> object:
    try:
        return value if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return value


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _is_real(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


@frozen(kw_only=True)
class Request:
    """One prompt and how to continue it. Raises RequestError with every bad value at once."""

    prompt_token_ids: tuple[int, ...] = field(converter=as_token_ids)
    max_new_tokens: int = field(default=64, converter=_whole)
    temperature: float = field(default=0.0, converter=_real)
    """0 takes the most probable token; otherwise logits are divided by it."""
    top_p: float = field(default=1.0, converter=_real)
    """Sample from the most probable tokens that together have this mass."""
    seed: int | None = field(default=None, converter=_whole)
    """Equal seeds give equal samples, whatever else is in the batch; None draws a fresh one."""
    stop: tuple[str, ...] = field(default=(), converter=_texts)
    """Generation ends before the first of these strings; the text never shows any part of it."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=as_token_ids)
    ignore_eos: bool = False
    logprobs: int = field(default=0, converter=_whole)
    """Most probable alternatives to report per token beside the chosen one; 0 reports nothing."""

    def __attrs_post_init__(self) -> None:
        problems = []
        if not self.prompt_token_ids:
            problems.append("prompt is empty, at least 1 token is needed; give text or token ids")
        if not _is_whole(self.max_new_tokens, 1):
            problems.append(
                f"max_new_tokens {self.max_new_tokens!r} is no whole number from 1 up; raise it"
            )
        if not (_is_real(self.temperature) and self.temperature >= 0):
            problems.append(f"temperature {self.temperature!r} is not in [0, inf); 0 means greedy")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            problems.append(f"top_p {self.top_p!r} is not in (0, 1]; 1 keeps every token")
        if not (self.seed is None or (_is_whole(self.seed, 0) and self.seed < SEED_LIMIT)):
            problems.append(f"seed {self.seed!r} is no whole number in [0, 2**63); choose another")
        if not all(isinstance(text, str) and text for text in self.stop):
            problems.append(
                f"stop {self.stop!r} has an empty string or something that is no text; remove it"
            )
        if not _is_whole(self.logprobs, 0):
            problems.append(
                f"logprobs {self.logprobs!r} is no whole number from 0 up; 0 means none"
            )
        if problems:
            raise RequestError("request: " + "; ".join(problems))

    @property
    def total_tokens(self) -> int:
        """Positions that admission reserves, so that a running request never runs out."""
        return len(self.prompt_token_ids) + self.max_new_tokens


@frozen(kw_only=True)
class Completion:
    """What became of one prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    """Every generated token, an end or stop token included."""
    text: str = ""
    """Decoded tokens without an end token, cut before a stop string; "" without a tokenizer."""
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per generated token if the request asked for them."""
    error: BaseException | None = None
    """Set for a rejected request, and for one that a failed forward took down."""


@frozen(kw_only=True)
class Delta:
    """What happened to a request since it was last read."""

    text: str = ""
    """New text that is final: whole characters, never part of a stop string."""
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    """Set once the request has ended; nothing comes after it."""


@define(eq=False, kw_only=True)
class RequestHandle:
    """A submitted request. Callers `read` it and look at `completion`; the rest belongs to the engine."""

    request: Request
    sampler: RequestSampler
    text: TextStream
    slot: int = -1
    """-1 while it waits, and after it ended."""
    num_committed: int = 0
    """Tokens whose state the pool holds."""
    token_ids: list[int] = field(factory=list)
    logprobs: list[TokenLogprob] = field(factory=list)
    completion: Completion | None = None
    """Appears when the request ends, for whatever reason."""
    _num_read: int = 0

    @property
    def finished(self) -> bool:
        return self.completion is not None

    def read(self) -> Delta:
        """Text and tokens since the last call."""
        token_ids = tuple(self.token_ids[self._num_read :])
        self._num_read = len(self.token_ids)
        return Delta(text=self.text.take(), token_ids=token_ids, completion=self.completion)

    @property
    def num_pending(self) -> int:
        """Known tokens that no forward has processed: 1 while decoding, more while prefilling."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - self.num_committed

    def next_tokens(self, num_tokens: int) -> Sequence[int]:
        """The first `num_tokens` pending ones."""
        prompt = self.request.prompt_token_ids
        start = self.num_committed
        if start < len(prompt):
            return prompt[start : start + num_tokens]
        start -= len(prompt)
        return self.token_ids[start : start + num_tokens]

    def complete(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Freeze what was generated so far as the completion."""
        self.completion = Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text.text,
            finish_reason=reason,
            logprobs=tuple(self.logprobs),
            error=error,
        )
