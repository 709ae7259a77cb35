"""Serving a list of prompts: what `Engine.generate` and `Engine.stream` do between two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from dsv4.engine.request import (
    Completion,
    Delta,
    FinishReason,
    Request,
    RequestHandle,
    as_token_ids,
)
from dsv4.errors import RequestError
from dsv4.log import get_logger

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine

log = get_logger(__name__)

Prompt = str | Sequence[int]


class PromptOptions(TypedDict, total=False):
    """Keyword options of `generate` and `stream`: fields of `Request`, which has their defaults."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | Sequence[int] | None
    """One number seeds every prompt alike, so that a prompt's text does not depend on its place in the list;
    for different samples of one prompt give a sequence, one seed per prompt."""
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int


def as_list(prompts: str | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list; a single str is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts {prompts!r}: must be a list of prompts; wrap it: [prompt]")
    listed = list(prompts)
    if listed and isinstance(listed[0], int):
        raise RequestError(
            f"prompts[0] is the number {listed[0]}, not a prompt; wrap the token ids: [token_ids]"
        )
    return listed


class PromptRun:
    """One call of `generate` or `stream`. Requests are validated here, before anything runs."""

    def __init__(self, engine: Engine, prompts: list[Prompt], options: PromptOptions) -> None:
        self._engine = engine
        # Bad options are the caller's, not a prompt's: they raise, whatever the prompts are.
        fields: dict[str, Any] = dict(options)
        seeds = _seeds(fields.pop("seed", None), len(prompts))
        for seed in seeds:
            Request(prompt_token_ids=(0,), seed=seed, **fields)
        self._pending = deque(
            (index, self._request(prompt, seed, fields))
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
        self._live: dict[RequestHandle, int] = {}
        self._num_new_tokens = 0

    def deltas(self) -> Generator[tuple[int, Delta], None, None]:
        """(index, delta) pairs until every prompt is done; closing the generator cancels the rest."""
        num_prompt_tokens = sum(len(item.prompt_token_ids) for _, item in self._pending)
        num_prompts, start = len(self._pending), time.perf_counter()
        try:
            while self._pending or self._live:
                yield from self._submit()
                yield from self._step()
                yield from self._read()
        finally:
            for handle in self._live:
                self._engine.cancel(handle)
            seconds = time.perf_counter() - start
            log.info(
                "generated",
                prompts=num_prompts,
                prompt_tokens=num_prompt_tokens,
                new_tokens=self._num_new_tokens,
                seconds=round(seconds, 3),
                tokens_per_second=round(self._num_new_tokens / seconds, 1),
            )

    def _request(
        self, prompt: Prompt, seed: int | None, fields: dict[str, Any]
    ) -> Request | Completion:
        """The request of a prompt, or the completion that says why it cannot be served."""
        token_ids: tuple[int, ...] = ()
        try:
            token_ids = tuple(self._encode(prompt))
            request = Request(prompt_token_ids=token_ids, seed=seed, **fields)
            self._engine.check(request)
        except RequestError as error:
            return _rejected(token_ids, error)
        return request

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        tokenizer = self._engine.model.tokenizer
        if tokenizer is None:
            raise RequestError(
                f"prompt {prompt[:40]!r} is text, but the model has no tokenizer; give token ids"
            )
        try:
            return tokenizer.encode(prompt)
        except UnicodeError as error:
            raise RequestError(f"prompt: not valid text ({error}); correct its encoding") from error

    def _submit(self) -> Iterator[tuple[int, Delta]]:
        """Queue as many prompts as there is room for."""
        while self._pending:
            index, item = self._pending[0]
            if isinstance(item, Completion):
                self._pending.popleft()
                yield index, Delta(completion=item)
                continue
            handle = self._engine.submit_if_room(item)
            if handle is None:
                return
            self._pending.popleft()
            self._live[handle] = index

    def _step(self) -> Iterator[tuple[int, Delta]]:
        """One step; if nothing could run, reject what blocks, for it would block forever."""
        engine = self._engine
        num_forwards = engine.num_forwards
        if not (self._pending or self._live) or engine.step() or engine.num_forwards > num_forwards:
            return
        in_queue = engine.num_waiting > 0
        error = engine.reject_blocked()
        if self._pending and not in_queue:
            index, item = self._pending.popleft()
            yield index, Delta(completion=_rejected(item.prompt_token_ids, error))

    def _read(self) -> Iterator[tuple[int, Delta]]:
        """News of this call's requests. Another call may have run the step that made them."""
        for handle, index in list(self._live.items()):
            delta = handle.read()
            self._num_new_tokens += len(delta.token_ids)
            if delta.completion is not None:
                del self._live[handle]
            if delta.token_ids or delta.completion is not None:
                yield index, delta


def _seeds(seed: int | Sequence[int] | None, num_prompts: int) -> list[int | None]:
    if not isinstance(seed, Sequence):
        return [seed] * num_prompts
    if len(seed) != num_prompts:
        raise RequestError(
            f"seed: {len(seed)} seeds for {num_prompts} prompts; give one each, or one number for all"
        )
    return list(seed)


def _rejected(token_ids: tuple[int, ...], error: RequestError) -> Completion:
    return Completion(prompt_token_ids=token_ids, finish_reason=FinishReason.REJECTED, error=error)
