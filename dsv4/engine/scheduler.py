"""Who runs in the next forward, and with how many tokens. Host only; it moves no data."""

from __future__ import annotations

from collections import deque

from dsv4.engine.request import Request, RequestHandle
from dsv4.errors import PoolExhaustedError, RequestError
from dsv4.pool.base import KVPool


class Scheduler:
    """First come, first served: a request that does not fit yet holds back those behind it, so that it
    cannot starve. An admitted request owns a slot and pages for all tokens it may reach."""

    def __init__(
        self,
        pool: KVPool,
        *,
        max_batch_tokens: int,
        max_batch_requests: int | None,
        chunk_tokens: int | None,
    ) -> None:
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = min(chunk_tokens or max_batch_tokens, max_batch_tokens)
        # Every running request can then take at least its next token in each forward.
        self._max_running = min(max_batch_requests or max_batch_tokens, max_batch_tokens)
        self.waiting: deque[RequestHandle] = deque()
        self.running: list[RequestHandle] = []

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one request in one forward."""
        return self._chunk_tokens

    def check(self, request: Request) -> None:
        """Raise RequestError if the pool could not hold the request even when empty."""
        total = request.total_tokens
        text = f"prompt of {len(request.prompt_token_ids)} tokens + max_new_tokens {request.max_new_tokens}"
        max_context = self._pool.config.max_context
        if total > max_context:
            raise RequestError(
                f"{text} = {total} tokens, max_context is {max_context}; "
                f"shorten the prompt, lower max_new_tokens or raise max_context"
            )
        pages, num_pages = self._num_pages(total), self._pool.geometry.num_pages
        if pages > num_pages:
            raise RequestError(
                f"{text} = {total} tokens need {pages} pages, the pool has {num_pages}; "
                f"shorten the prompt, lower max_new_tokens or raise num_pages"
            )

    def admit(self) -> None:
        """Move waiting requests into slots as long as the next one fits."""
        while self.waiting and len(self.running) < self._max_running:
            if not self._place(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def plan(self) -> list[tuple[RequestHandle, int]]:
        """The next forward: requests with the tokens each one gets. Decoding ones come first, prompt chunks
        fill the rest in order of admission."""
        plan = [(handle, 1) for handle in self.running if handle.num_pending == 1]
        budget = self._max_batch_tokens - len(plan)
        for handle in self.running:
            if handle.num_pending > 1 and budget > 0:
                num_tokens = min(handle.num_pending, self._chunk_tokens, budget)
                plan.append((handle, num_tokens))
                budget -= num_tokens
        return plan

    def remove(self, handle: RequestHandle) -> None:
        """Forget a request and give its slot and pages back."""
        if handle in self.running:
            self.running.remove(handle)
            slot, handle.slot = handle.slot, -1
            self._pool.release(slot)
        elif handle in self.waiting:
            self.waiting.remove(handle)
        else:
            raise RequestError(
                "handle: not a live request of this engine; use what submit returned"
            )

    def _place(self, handle: RequestHandle) -> bool:
        pool, total = self._pool, handle.request.total_tokens
        if pool.num_free_slots < 1 or pool.num_free_pages < self._num_pages(total):
            return False
        slot = pool.acquire()
        try:
            pool.reserve(slot, total)
        except BaseException as error:
            pool.release(slot)
            if isinstance(error, PoolExhaustedError):
                return False
            raise
        handle.slot = slot
        return True

    def _num_pages(self, num_tokens: int) -> int:
        geometry = self._pool.geometry
        return -(-num_tokens // geometry.page_tokens) if geometry.pages_per_slot else 0
