"""The sections of fill's one launch: each writes some buffers, in tiles that any program can compute by itself.

Legend: T tokens, B requests, E windows that may close, S fold segments, J fold steps, M pooled tokens, P half the rope
width, W most rows of a token in a stream.
`batch` as in fill_tiles_triton; `row`: the section's row of the table, addresses of its buffers and then its numbers;
`extent`: what the batch shape says of the section.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.metadata.fill_table import MAX_BUFFERS, Kind
from dsv4.metadata.fill_tiles_triton import (
    NEVER,
    closing_ends,
    find_closing,
    find_requests,
    find_rows,
    load_requests,
    load_tokens,
    own_or_state,
    paged_row,
    rows_below,
)

# Globals of device code must be constexpr.
NUMBERS = tl.constexpr(MAX_BUFFERS)
WINDOW = tl.constexpr(int(Kind.WINDOW))
ENTRIES = tl.constexpr(int(Kind.ENTRIES))
LANES = tl.constexpr(int(Kind.LANES))
TOKENS = tl.constexpr(int(Kind.TOKENS))
COMPRESSED_TOKENS = tl.constexpr(int(Kind.COMPRESSED_TOKENS))
ROPE = tl.constexpr(int(Kind.ROPE))
ENTRY_ROPE = tl.constexpr(int(Kind.ENTRY_ROPE))
ENTRY_LOC = tl.constexpr(int(Kind.ENTRY_LOC))
OVERLAP = tl.constexpr(int(Kind.OVERLAP))
FOLD = tl.constexpr(int(Kind.FOLD))
LAST_ROWS = tl.constexpr(int(Kind.LAST_ROWS))


@triton.jit
def _ints(row, index: tl.constexpr):
    return tl.load(row + index).to(tl.pointer_type(tl.int32))


@triton.jit
def _floats(row, index: tl.constexpr):
    return tl.load(row + index).to(tl.pointer_type(tl.float32))


@triton.jit
def _number(row, index: tl.constexpr):
    return tl.load(row + NUMBERS + index).to(tl.int32)


@triton.jit
def stream(
    kind, tile, extent, row, batch, pages, num_tokens,
    SCAN: tl.constexpr, TOKENS_TILE: tl.constexpr, LANES_TILE: tl.constexpr,
):  # fmt: skip
    """Window rows, HCA entries, or the lanes that select fills. Token t owns lanes [indptr[t], indptr[t + 1]); the rest
    of its W lanes it takes behind the last token's, so that all T * W lanes have exactly one writer."""
    width = extent
    ratio = _number(row, 0)
    # only a CSA stream's cap depends on the batch shape
    cap = tl.where(kind == LANES, width, _number(row, 1))
    full = tl.where(kind == ENTRIES, NEVER, cap * ratio)
    blocks = tl.cdiv(tl.maximum(width, 1), LANES_TILE)
    token = (tile // blocks) * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    lane = (tile % blocks) * LANES_TILE + tl.arange(0, LANES_TILE)
    request, before, total = find_rows(token, batch, ratio, cap, full, SCAN)
    slot, committed, query, local, position = load_tokens(token, request, batch)
    live = slot >= 0
    count = tl.where(live, tl.minimum((position + 1) // ratio, cap), 0)
    indptr = before + tl.where(live, rows_below(committed, local, ratio, cap, full), 0)
    inside = token < num_tokens
    if tile % blocks == 0:
        tl.store(_ints(row, 0) + token, indptr, mask=inside)
    if tile == 0:
        tl.store(_ints(row, 0) + num_tokens, total)

    lane = lane[None, :]
    used = (lane < count[:, None]) & inside[:, None]
    spare = (token.to(tl.int64) * width + total - indptr - count)[:, None] + lane
    place = tl.where(used, indptr[:, None] + lane, spare)
    inside = (
        inside[:, None] & (lane < width) & (place >= 0) & (place < num_tokens.to(tl.int64) * width)
    )
    if kind == LANES:
        own = token.to(tl.int64)[:, None] * width + lane
        tl.store(_ints(row, 1) + own, place.to(tl.int32), mask=inside)
    else:
        if kind == WINDOW:
            back = (count - 1)[:, None] - lane
            at = position[:, None] - back
            ring_rows = _number(row, 2)
            fresh = (query > _number(row, 3))[:, None] & (at >= committed[:, None])
            ring_row = slot[:, None] * ring_rows + at % ring_rows
            rows = tl.where(fresh, _number(row, 4) + token[:, None] - back, ring_row)
        else:
            rows = paged_row(pages, slot[:, None], lane, _number(row, 2), _number(row, 3), used)
        tl.store(_ints(row, 1) + place, tl.where(used, rows, -1), mask=inside)


@triton.jit
def tokens(tile, extent, row, batch, num_tokens, SCAN: tl.constexpr, TOKENS_TILE: tl.constexpr):
    """Request, slot, position and window row of each token. `extent`: whether chunks may occur."""
    token = tile * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    inside = token < num_tokens
    request = find_requests(token, batch, SCAN)
    slot, _committed, query, local, position = load_tokens(token, request, batch)
    ring_rows = _number(row, 0)
    stored = (slot >= 0) & (query - local <= ring_rows)
    loc = tl.where(stored, slot * ring_rows + position % ring_rows, -1)
    fresh = (slot >= 0) & (query > _number(row, 1))
    tl.store(_ints(row, 0) + token, request, mask=inside)
    tl.store(_ints(row, 1) + token, slot, mask=inside)
    tl.store(_ints(row, 2) + token, position, mask=inside)
    tl.store(_ints(row, 3) + token, loc, mask=inside)
    tl.store(_ints(row, 4) + token, tl.where(fresh, -1, loc), mask=inside)
    if extent > 0:
        tl.store(_ints(row, 5) + token, tl.where(fresh, loc, -1), mask=inside)


@triton.jit
def compressed_tokens(
    tile, row, batch, num_tokens, SCAN: tl.constexpr, TOKENS_TILE: tl.constexpr
):  # fmt: skip
    """Visible entries, row of the position table and state row of each token."""
    token = tile * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    inside = token < num_tokens
    request = find_requests(token, batch, SCAN)
    slot, _committed, query, local, position = load_tokens(token, request, batch)
    ratio, ring_rows = _number(row, 0), _number(row, 1)
    stored = (slot >= 0) & (query - local <= ring_rows)
    loc = tl.where(stored, slot * ring_rows + position % ring_rows, -1)
    visible = tl.where(slot >= 0, (position + 1) // ratio, 0)
    tl.store(_ints(row, 0) + token, visible, mask=inside)
    tl.store(_ints(row, 1) + token, position % ratio, mask=inside)
    tl.store(_ints(row, 2) + token, loc, mask=inside)


@triton.jit
def rope(
    kind, tile, extent, row, batch,
    SCAN: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """cos and sin of position * frequency: of the tokens, or of the entries at their window's first position."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    inside = lane < extent
    half = _number(row, 0)
    if kind == ROPE:
        request = find_requests(lane, batch, SCAN)
        _slot, _committed, _query, _local, position = load_tokens(lane, request, batch)
    else:
        ratio = _number(row, 1)
        _request, entry, _valid = find_closing(lane, batch, ratio, SCAN)
        position = ratio * entry
    frequencies = _floats(row, 2)
    for first in range(0, half, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        frequency = tl.load(frequencies + pair, mask=pair < half, other=0.0)
        angle = position.to(tl.float32)[:, None] * frequency[None, :]
        place = lane.to(tl.int64)[:, None] * half + pair[None, :]
        mask = inside[:, None] & (pair < half)[None, :]
        # not the approximate instructions: positions of a million turn the first pair 160,000 times
        tl.store(_floats(row, 0) + place, tl.cos(angle), mask=mask)
        tl.store(_floats(row, 1) + place, tl.sin(angle), mask=mask)


@triton.jit
def entry_loc(
    tile, extent, row, batch, pages, SCAN: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows that the entries of closing windows are written to, in the entry table and (CSA) the table of index keys."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    inside = lane < extent
    request, entry, valid = find_closing(lane, batch, _number(row, 0), SCAN)
    slot, _committed, _query = load_requests(request, batch)
    base = _number(row, 2)
    key_row = paged_row(pages, slot, entry, _number(row, 1), 0, valid)
    tl.store(_ints(row, 0) + lane, tl.where(key_row >= 0, base + key_row, -1), mask=inside)
    if _number(row, 3) > 0:
        tl.store(_ints(row, 1) + lane, key_row, mask=inside)


@triton.jit
def overlap(
    tile, extent, row, batch, SCAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Raw rows of the previous and the own window of each closing CSA window, in token order."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    ratio, ring_rows, num_state_rows = _number(row, 0), _number(row, 1), _number(row, 2)
    request, entry, valid = find_closing(lane, batch, ratio, SCAN)
    slot, committed, _query = load_requests(request, batch)
    start = tl.load(batch[1] + request)
    for first in range(0, 2 * ratio, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        position = (ratio * (entry - 1))[:, None] + column
        state_row = slot[:, None] * ring_rows + position % ring_rows
        source = own_or_state(
            position, committed[:, None], start[:, None], state_row, num_state_rows
        )
        source = tl.where(valid[:, None] & (position >= 0), source, -1)
        place = lane.to(tl.int64)[:, None] * (2 * ratio) + column
        tl.store(
            _ints(row, 0) + place, source, mask=(lane < extent)[:, None] & (column < 2 * ratio)
        )


@triton.jit
def fold(
    tile, extent, row, batch, max_query,
    SCAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Segments [0, E) fold a closing window up to its last token, segments [E, E + B) what this forward puts out of a
    rollback's reach. `extent`: E."""
    ratio, in_place, num_state_rows = _number(row, 0), _number(row, 1), _number(row, 2)
    segment = tile * ROWS + tl.arange(0, ROWS)
    inside = segment < extent + batch[4]
    closes = segment < extent
    closing_request, entry, closing = find_closing(
        tl.where(closes, segment, NEVER), batch, ratio, SCAN
    )
    request = tl.where(closes, closing_request, segment - extent)
    slot, committed, query = load_requests(request, batch)
    start = tl.load(batch[1] + request, mask=inside, other=0)
    folded = tl.maximum(committed + query - in_place, 0)
    begin = ratio * tl.where(closes, entry, folded // ratio)
    end = tl.where(closes, begin + ratio, folded)
    valid = tl.where(closes, closing, slot >= 0)
    tl.store(_ints(row, 2) + segment, begin, mask=inside)
    tl.store(_ints(row, 3) + segment, tl.where(valid, slot, -1), mask=inside)
    steps = tl.minimum(ratio, tl.where(extent > 0, in_place, 0) + max_query)
    # older tokens are in the accumulator: only the D raw rows may still be missing from it
    oldest = tl.maximum(begin, committed - in_place)
    for first in range(0, steps, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        position = oldest[:, None] + column
        state_row = slot[:, None] * in_place + position % in_place
        source = own_or_state(
            position, committed[:, None], start[:, None], state_row, num_state_rows
        )
        source = tl.where(valid[:, None] & (position < end[:, None]), source, -1)
        place = segment.to(tl.int64)[:, None] * steps + column
        mask = inside[:, None] & (column < steps)
        tl.store(_ints(row, 0) + place, source, mask=mask)
        tl.store(_ints(row, 1) + place, position, mask=mask)


@triton.jit
def last_rows(row, batch, SCAN: tl.constexpr):
    """Token row of each request's newest token, -1 for idle ones."""
    for first in range(0, batch[4], SCAN):
        b = first + tl.arange(0, SCAN)
        inside = b < batch[4]
        query = tl.load(batch[2] + b, mask=inside, other=0)
        start = tl.load(batch[1] + b, mask=inside, other=0)
        tl.store(_ints(row, 0) + b, tl.where(query > 0, start + query - 1, -1), mask=inside)


@triton.jit
def accumulators(row, batch, SCAN: tl.constexpr):
    """Where each request's HCA accumulator goes, the tokens it has folded then, and the request's closing windows."""
    ratio, in_place = _number(row, 0), _number(row, 1)
    total = batch[4] * 0
    tl.store(_ints(row, 2), total)
    for first in range(0, batch[4], SCAN):
        b = first + tl.arange(0, SCAN)
        inside = b < batch[4]
        slot, committed, query = load_requests(b, batch)
        closed, end = closing_ends(b, total, batch, ratio)
        tl.store(_ints(row, 0) + b, tl.where(query > 0, slot, -1), mask=inside)
        tl.store(_ints(row, 1) + b, tl.maximum(committed + query - in_place, 0), mask=inside)
        tl.store(_ints(row, 2) + b + 1, end, mask=inside)
        total += tl.sum(closed, 0)
