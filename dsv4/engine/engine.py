"""Continuous batching over one model: requests join and leave at any step.

Legend: B requests, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Unpack

import torch
from torch import Tensor

from dsv4.config import EngineConfig
from dsv4.engine.prompts import Prompt, PromptOptions, PromptRun, as_list
from dsv4.engine.request import Completion, Delta, FinishReason, Request, RequestHandle
from dsv4.engine.runner import ModelRunner, Rows
from dsv4.engine.sampler import RequestSampler, Sample, sample
from dsv4.engine.scheduler import Scheduler
from dsv4.engine.text import TextStream
from dsv4.errors import BatchError, ConfigError, RequestError
from dsv4.log import get_logger
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import KVPool

log = get_logger(__name__)


class Engine:
    """Generates for many prompts at once. Not thread-safe; one engine per pool.

    `generate` and `stream` serve a list of prompts; `submit`, `step` and `cancel` are what they are made of;
    `prefill` and `decode` run one forward on slots that the caller owns (`engine.pool.acquire()`).
    `config` must name the backend that the model runs on, and adds how requests are queued and chunked.
    """

    def __init__(self, model: ModelRunner, config: EngineConfig | None = None) -> None:
        self.model = model
        self.config = config or EngineConfig(backend=model.backend.config)
        if self.config.backend.resolved(model.config) != model.backend.config:
            raise ConfigError(
                f"backend {self.config.backend}: differs from the one the model runs on, "
                f"{model.backend.config}; load the model with the engine's backend config"
            )
        self.num_forwards = 0
        """Forwards that `step` has run."""
        self._scheduler = Scheduler(
            self.pool,
            max_batch_tokens=model.backend.config.max_batch_tokens,
            max_batch_requests=model.backend.config.max_batch_requests,
            chunk_tokens=self.config.chunk_tokens,
        )

    @property
    def pool(self) -> KVPool:
        return self.model.backend.pool

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._scheduler.waiting)

    # many prompts

    def generate(
        self, prompts: str | Sequence[Prompt], **options: Unpack[PromptOptions]
    ) -> Iterator[Completion]:
        """Completions in the order of the prompts, each as soon as it and those before it are done.

        A prompt is a str or a sequence of token ids, of any length; the options are the fields of `Request`.
        Bad options raise RequestError here. A prompt that cannot be served becomes a completion of
        finish_reason "rejected" with its error, and disturbs no other. Abandoning the iterator cancels the rest.
        """
        return self._in_order(self.stream(prompts, **options))

    def stream(
        self, prompts: str | Sequence[Prompt], **options: Unpack[PromptOptions]
    ) -> Generator[tuple[int, Delta], None, None]:
        """Like `generate`, as it comes: (index of the prompt, new text and tokens). The last delta of a prompt
        carries its completion."""
        return PromptRun(self, as_list(prompts), options).deltas()

    @staticmethod
    def _in_order(deltas: Generator[tuple[int, Delta], None, None]) -> Iterator[Completion]:
        done: dict[int, Completion] = {}
        next_index = 0
        with closing(deltas):
            for index, delta in deltas:
                if delta.completion is not None:
                    done[index] = delta.completion
                while next_index in done:
                    yield done.pop(next_index)
                    next_index += 1

    # single requests

    def check(self, request: Request) -> None:
        """Raise RequestError if this engine can never serve the request."""
        vocab_size = self.model.config.vocab_size
        bad = [i for i in request.prompt_token_ids if not 0 <= i < vocab_size]
        if bad:
            raise RequestError(
                f"prompt token id {bad[0]} is not in [0, {vocab_size}); use this model's tokenizer"
            )
        if request.logprobs > vocab_size:
            raise RequestError(
                f"logprobs {request.logprobs} exceeds the vocabulary of {vocab_size}; lower it"
            )
        if request.stop and self.model.tokenizer is None:
            raise RequestError(
                f"stop {request.stop!r} needs text, but the model has no tokenizer; use stop_token_ids"
            )
        self._scheduler.check(request)

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request; it starts as soon as a slot and its pages are free. Raises RequestError, and changes
        nothing, if it can never be served or max_queue requests wait already."""
        self.check(request)
        handle = self.submit_if_room(request)
        if handle is None:
            raise RequestError(
                f"queue: {self.num_waiting} requests wait, max_queue is {self.config.max_queue}; "
                f"step until one has started, or raise max_queue"
            )
        return handle

    def submit_if_room(self, request: Request) -> RequestHandle | None:
        """The handle of a request that passed `check`, or None if the queue is full."""
        tokenizer = self.model.tokenizer
        handle = RequestHandle(
            request=request,
            sampler=RequestSampler(
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                logprobs=request.logprobs,
            ),
            text=TextStream(tokenizer.stream() if tokenizer else None, request.stop),
        )
        self._scheduler.waiting.append(handle)
        self._scheduler.admit()
        if self.num_waiting > self.config.max_queue:
            self._scheduler.remove(handle)
            return None
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """End a request; its slot and pages are free when this returns. No effect on one that has ended."""
        if not handle.finished:
            self._end(handle, FinishReason.CANCELLED)

    def reject_blocked(self) -> RequestError:
        """End the first waiting request, if any, for want of memory that this engine does not control: nothing
        runs that could free it. Returns the error that says so."""
        pool = self.pool
        error = RequestError(
            f"request: nothing runs, {pool.num_free_slots} slots and {pool.num_free_pages} pages are free, "
            f"which is too few; release the slots held outside the engine"
        )
        if self._scheduler.waiting:
            self._end(self._scheduler.waiting[0], FinishReason.REJECTED, error)
        return error

    @torch.no_grad()
    def step(self) -> tuple[RequestHandle, ...]:
        """Admit what fits and run one forward. Returns the requests that have news: `handle.read()`.

        If the forward fails, its requests end as cancelled with the error, their memory is freed, and the error
        is raised; what it did not contain goes on.
        """
        self._scheduler.admit()
        plan = self._scheduler.plan()
        if not plan:
            return ()
        try:
            logits_BV = self._forward([(h.slot, h.next_tokens(n)) for h, n in plan])
            self.num_forwards += 1
            for handle, num_tokens in plan:
                handle.num_committed += num_tokens
            rows = [(h, logits_BV[b]) for b, (h, _) in enumerate(plan) if h.num_pending == 0]
            samples = sample([(handle.sampler, logits) for handle, logits in rows])
            for (handle, _), sampled in zip(rows, samples, strict=True):
                self._accept(handle, sampled)
        except BaseException as error:
            for handle, _ in plan:
                if not handle.finished:
                    self._end(handle, FinishReason.CANCELLED, error)
            raise
        log.debug(
            "step",
            requests=len(plan),
            tokens=sum(num_tokens for _, num_tokens in plan),
            sampled=len(samples),
            waiting=self.num_waiting,
        )
        return tuple(handle for handle, _ in rows)

    # explicit slots

    @torch.no_grad()
    def prefill(self, slot: int, token_ids: Sequence[int], *, rows: Rows = "last") -> Tensor:
        """Process tokens behind what the slot holds, in chunks if they are many, and commit them.

        Returns fp32 logits: [1, V] of the last token, or [T, V] of all. Reserves what it needs; raises
        PoolExhaustedError or SlotError before the first chunk.
        """
        if len(token_ids) == 0:
            raise BatchError("prefill: no tokens, at least 1 is needed; skip the call")
        pool, num_tokens = self.pool, len(token_ids)
        pool.reserve(slot, pool.length(slot) + num_tokens)
        logits_TV: Tensor | None = None
        for start in range(0, num_tokens, self._scheduler.chunk_tokens):
            chunk = token_ids[start : start + self._scheduler.chunk_tokens]
            chunk_TV = self._forward([(slot, chunk)], rows=rows)
            if rows == "last" or len(chunk) == num_tokens:
                logits_TV = chunk_TV
                continue
            # Copied at once: the next forward may reuse the memory that this one's logits lie in.
            if logits_TV is None:
                logits_TV = chunk_TV.new_empty(num_tokens, chunk_TV.shape[1])
            logits_TV[start : start + len(chunk)] = chunk_TV
        assert logits_TV is not None
        return logits_TV

    @torch.no_grad()
    def decode(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """One token more for each slot, committed. Returns fp32 logits [B, V] in the order of the slots."""
        if len(slots) != len(token_ids) or len(slots) == 0:
            raise BatchError(
                f"decode: {len(slots)} slots and {len(token_ids)} tokens; give one token per slot"
            )
        for slot in slots:
            self.pool.reserve(slot, self.pool.length(slot) + 1)
        return self._forward([(s, [t]) for s, t in zip(slots, token_ids, strict=True)])

    # the parts of a step

    def _forward(self, work: list[tuple[int, Sequence[int]]], *, rows: Rows = "last") -> Tensor:
        """Run a forward and commit its tokens."""
        logits = self.model.forward(ForwardBatch.of(work), rows=rows)
        for slot, token_ids in work:
            self.pool.commit(slot, len(token_ids))
        return logits

    def _accept(self, handle: RequestHandle, sampled: Sample) -> None:
        """Append a generated token, and end the request if it was the last one."""
        request, token_id = handle.request, sampled.token_id
        handle.token_ids.append(token_id)
        if sampled.logprob is not None:
            handle.logprobs.append(sampled.logprob)
        reason = None
        if token_id == self.model.config.eos_token_id and not request.ignore_eos:
            reason = FinishReason.EOS
        elif token_id in request.stop_token_ids or handle.text.push(token_id):
            reason = FinishReason.STOP
        elif len(handle.token_ids) == request.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(handle, reason)

    def _end(
        self, handle: RequestHandle, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        self._scheduler.remove(handle)
        # Whatever ends it: what is still held back for a stop string or half a character is final now.
        handle.text.finish()
        handle.complete(reason, error)
