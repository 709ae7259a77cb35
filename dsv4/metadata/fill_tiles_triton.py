"""Device functions of fill: which request a token or a closing window belongs to, and where its rows lie.

Nothing is scanned over tokens: every count that a prefix sum adds up has a closed form over consecutive positions, so a
program that sums over the requests in front knows where its own tokens' lanes lie. Programs need nothing of each other.
`batch` is the tuple (slots, starts, query_lengths, lengths, num_requests) of the input buffers.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def load_requests(request, batch):
    """Slot, committed tokens (0 without a slot) and new tokens; behind the last request: no slot, no tokens."""
    slots, _starts, query_lengths, lengths, num_requests = batch
    inside = request < num_requests
    slot = tl.load(slots + request, mask=inside, other=-1)
    query = tl.load(query_lengths + request, mask=inside, other=0)
    committed = tl.load(lengths + slot, mask=slot >= 0, other=0)
    return slot, committed, query


@triton.jit
def rows_below(committed, num, ratio, cap, full):
    """Rows that the first `num` new tokens of a request read together: the sum of min(cap, (committed + i) // ratio)
    over i = 1..num. `full`: from as many tokens on, the cap binds."""
    first = committed + 1
    rising = tl.minimum(tl.maximum(full - first, 0), num)
    # a step of `ratio` tokens each adds 0, 1, 2, .. rows; the tokens behind the last whole step add one more each
    tokens = first % ratio + rising
    steps = tokens // ratio
    triangle = (steps >> 1) * ((steps - 1) | 1)  # steps * (steps - 1) / 2 of any int32 result
    stepped = ratio * triangle + steps * (tokens - steps * ratio)
    return (first // ratio) * rising + stepped + cap * (num - rising)


@triton.jit
def find_requests(token, batch, SCAN: tl.constexpr):
    """Request of each token: how many requests end at or before it. Exact with idle requests among them."""
    starts, num_requests = batch[1], batch[4]
    request = tl.zeros_like(token)
    for first in range(0, num_requests, SCAN):
        b = first + tl.arange(0, SCAN)
        end = tl.load(starts + b + 1, mask=b < num_requests, other=NEVER)
        request += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
    return request


@triton.jit
def find_rows(token, batch, ratio, cap, full, SCAN: tl.constexpr):
    """Request of each token, rows of a stream that all requests in front of it own, and rows of the whole stream."""
    starts, num_requests = batch[1], batch[4]
    request = tl.zeros_like(token)
    before = tl.zeros_like(token)
    total = num_requests * 0
    for first in range(0, num_requests, SCAN):
        b = first + tl.arange(0, SCAN)
        end = tl.load(starts + b + 1, mask=b < num_requests, other=NEVER)
        slot, committed, query = load_requests(b, batch)
        rows = tl.where(slot >= 0, rows_below(committed, query, ratio, cap, full), 0)
        gone = end[None, :] <= token[:, None]
        request += tl.sum(gone.to(tl.int32), 1)
        before += tl.sum(tl.where(gone, rows[None, :], 0), 1)
        total += tl.sum(rows, 0)
    return request, before, total


@triton.jit
def load_tokens(token, request, batch):
    """Slot (-1 = padding), committed tokens, query length, index within the request, and position (0 for padding)."""
    slot, committed, query = load_requests(request, batch)
    local = token - tl.load(batch[1] + request)
    position = tl.where(slot >= 0, committed + local, 0)
    return slot, committed, query, local, position


@triton.jit
def closing_ends(b, before, batch, ratio):
    """Windows that close in the requests b, and their running sum behind `before` of them."""
    slot, committed, query = load_requests(b, batch)
    closed = tl.where(slot >= 0, (committed + query) // ratio - committed // ratio, 0)
    return closed, before + tl.cumsum(closed, 0)


@triton.jit
def find_closing(lane, batch, ratio, SCAN: tl.constexpr):
    """Of each lane of closing windows: request (num_requests = none), its slot and committed tokens, the entry, and
    whether there is one."""
    num_requests = batch[4]
    request = tl.zeros_like(lane)
    before = tl.zeros_like(lane)
    total = num_requests * 0
    for first in range(0, num_requests, SCAN):
        b = first + tl.arange(0, SCAN)
        closed, end = closing_ends(b, total, batch, ratio)
        gone = (end[None, :] <= lane[:, None]) & (b < num_requests)[None, :]
        request += tl.sum(gone.to(tl.int32), 1)
        before += tl.sum(tl.where(gone, closed[None, :], 0), 1)
        total += tl.sum(closed, 0)
    valid = lane < total
    request = tl.where(valid, request, num_requests)
    slot, committed, _query = load_requests(request, batch)
    entry = tl.where(valid, committed // ratio + lane - before, 0)
    return request, slot, committed, entry, valid


@triton.jit
def paged_row(pages, slot, entry, rows_per_page, base, used):
    """Row of an entry, -1 where its page is absent. `pages`: (block table, its row stride, pages of a slot)."""
    block_table, stride, num_pages = pages
    logical = tl.minimum(entry // rows_per_page, num_pages - 1)
    page = tl.load(block_table + slot.to(tl.int64) * stride + logical, mask=used, other=-1)
    return tl.where(page >= 0, base + page * rows_per_page + entry % rows_per_page, -1)


@triton.jit
def own_or_state(position, committed, start, state_row, num_state_rows):
    """Index of a token's raw row: own projection row behind the state's rows if the token is of this forward."""
    local = position - committed
    return tl.where(local >= 0, num_state_rows + start + local, state_row)
