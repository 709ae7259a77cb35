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

# Globals of device code must be constexpr. Sections read their row of the table without a helper, for each call of one
# takes the interpreter a millisecond.
INTS = tl.constexpr(tl.pointer_type(tl.int32))
FLOATS = tl.constexpr(tl.pointer_type(tl.float32))
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
def _window_rows(lane, token, count, slot, committed, query, position, rings):
    """Window lanes in position order: own tokens of a chunk are fresh rows, everything else lies in the ring."""
    ring_rows, in_place, num_ring_rows = rings
    back = (count - 1)[:, None] - lane
    at = position[:, None] - back
    fresh = (query > in_place)[:, None] & (at >= committed[:, None])
    ring_row = slot[:, None] * ring_rows + at % ring_rows
    return tl.where(fresh, num_ring_rows + token[:, None] - back, ring_row)


@triton.jit
def stream(
    kind, tile, extent, ratio, row, batch, pages, num_tokens,
    SCAN: tl.constexpr, TOKENS_TILE: tl.constexpr, LANES_TILE: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """Window rows, HCA entries, or the lanes that select fills. Token t owns lanes [indptr[t], indptr[t + 1]); the rest
    of its W lanes it takes behind the last token's, so that all T * W lanes have exactly one writer. `extent`: W."""
    indptr_ptr, out_ptr = tl.load(row + 0).to(INTS), tl.load(row + 1).to(INTS)
    first_number = tl.load(row + NUMBERS + 0).to(tl.int32)
    second_number = tl.load(row + NUMBERS + 1).to(tl.int32)
    third_number = tl.load(row + NUMBERS + 2).to(tl.int32)
    cap = tl.where(kind == ENTRIES, NEVER, extent)
    full = tl.where(kind == ENTRIES, NEVER, extent * ratio)
    span: tl.constexpr = LANES_TILE * REPEAT
    blocks = tl.cdiv(tl.maximum(extent, 1), span)
    token = (tile // blocks) * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    inside = token < num_tokens
    request, before, total = find_rows(token, batch, ratio, cap, full, SCAN)
    slot, committed, query, local, position = load_tokens(token, request, batch)
    live = slot >= 0
    count = tl.where(live & inside, tl.minimum((position + 1) // ratio, cap), 0)
    indptr = before + tl.where(live, rows_below(committed, local, ratio, cap, full), 0)
    begin = (tile % blocks) * span
    if begin == 0:
        tl.store(indptr_ptr + token, indptr, mask=inside)
    if tile == 0:
        tl.store(indptr_ptr + num_tokens, total)

    own = token.to(tl.int64) * extent
    spare = own + total - indptr - count
    # holds unless a length exceeds what the batch shape promised: then lanes are missing, but none is elsewhere
    end = num_tokens.to(tl.int64) * extent
    inside = inside & (indptr + tl.minimum(count, extent) <= end) & (spare + count >= 0)
    for first in range(begin, tl.minimum(begin + span, extent), LANES_TILE):
        lane = first + tl.arange(0, LANES_TILE)[None, :]
        used = lane < count[:, None]
        place = tl.where(used, indptr[:, None], spare[:, None]) + lane
        mask = inside[:, None] & (lane < extent)
        if kind == LANES:
            tl.store(out_ptr + own[:, None] + lane, place.to(tl.int32), mask=mask)
        elif kind == WINDOW:
            rings = (first_number, second_number, third_number)
            rows = _window_rows(lane, token, count, slot, committed, query, position, rings)
            tl.store(out_ptr + place, tl.where(used, rows, -1), mask=mask)
        else:
            rows = paged_row(pages, slot[:, None], lane, first_number, second_number, used)
            tl.store(out_ptr + place, tl.where(used, rows, -1), mask=mask)


@triton.jit
def tokens(tile, extent, row, batch, num_tokens, SCAN: tl.constexpr, TOKENS_TILE: tl.constexpr):
    """Request, slot, position and window row of each token. `extent`: most new tokens of a request."""
    token = tile * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    inside = token < num_tokens
    request = find_requests(token, batch, SCAN)
    slot, _committed, query, local, position = load_tokens(token, request, batch)
    ring_rows = tl.load(row + NUMBERS + 0).to(tl.int32)
    stored = (slot >= 0) & (query - local <= ring_rows)
    loc = tl.where(stored, slot * ring_rows + position % ring_rows, -1)
    in_place = tl.load(row + NUMBERS + 1).to(tl.int32)
    fresh = (slot >= 0) & (query > in_place)
    tl.store(tl.load(row + 0).to(INTS) + token, request, mask=inside)
    tl.store(tl.load(row + 1).to(INTS) + token, slot, mask=inside)
    tl.store(tl.load(row + 2).to(INTS) + token, position, mask=inside)
    tl.store(tl.load(row + 3).to(INTS) + token, loc, mask=inside)
    tl.store(tl.load(row + 4).to(INTS) + token, tl.where(fresh, -1, loc), mask=inside)
    if extent > in_place:
        tl.store(tl.load(row + 5).to(INTS) + token, tl.where(fresh, loc, -1), mask=inside)


@triton.jit
def compressed_tokens(
    tile, extent, ratio, row, batch, SCAN: tl.constexpr, TOKENS_TILE: tl.constexpr
):  # fmt: skip
    """Visible entries, row of the position table and state row of each token."""
    token = tile * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    inside = token < extent
    request = find_requests(token, batch, SCAN)
    slot, _committed, query, local, position = load_tokens(token, request, batch)
    ring_rows = tl.load(row + NUMBERS + 0).to(tl.int32)
    stored = (slot >= 0) & (query - local <= ring_rows)
    loc = tl.where(stored, slot * ring_rows + position % ring_rows, -1)
    visible = tl.where(slot >= 0, (position + 1) // ratio, 0)
    tl.store(tl.load(row + 0).to(INTS) + token, visible, mask=inside)
    tl.store(tl.load(row + 1).to(INTS) + token, position % ratio, mask=inside)
    tl.store(tl.load(row + 2).to(INTS) + token, loc, mask=inside)


@triton.jit
def rope(
    kind, tile, extent, ratio, row, batch,
    SCAN: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """cos and sin of position * frequency: of the tokens, or of the entries at their window's first position."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    inside = lane < extent
    half = tl.load(row + NUMBERS + 0).to(tl.int32)
    if kind == ROPE:
        request = find_requests(lane, batch, SCAN)
        _slot, _committed, _query, _local, position = load_tokens(lane, request, batch)
    else:
        _request, _slot, _committed, entry, _valid = find_closing(lane, batch, ratio, SCAN)
        position = ratio * entry
    cos_ptr, sin_ptr = tl.load(row + 0).to(FLOATS), tl.load(row + 1).to(FLOATS)
    for first in range(0, half, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        frequency = tl.load(tl.load(row + 2).to(FLOATS) + pair, mask=pair < half, other=0.0)
        angle = position.to(tl.float32)[:, None] * frequency[None, :]
        place = lane.to(tl.int64)[:, None] * half + pair[None, :]
        mask = inside[:, None] & (pair < half)[None, :]
        # not the approximate instructions: positions of a million turn the first pair 160,000 times
        tl.store(cos_ptr + place, tl.cos(angle), mask=mask)
        tl.store(sin_ptr + place, tl.sin(angle), mask=mask)


@triton.jit
def entry_loc(
    tile, extent, ratio, row, batch, pages, SCAN: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows that the entries of closing windows are written to, in the entry table and (CSA) the table of index keys."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    inside = lane < extent
    _request, slot, _committed, entry, valid = find_closing(lane, batch, ratio, SCAN)
    rows_per_page = tl.load(row + NUMBERS + 0).to(tl.int32)
    base = tl.load(row + NUMBERS + 1).to(tl.int32)
    key_row = paged_row(pages, slot, entry, rows_per_page, 0, valid)
    row_in_table = tl.where(key_row >= 0, base + key_row, -1)
    tl.store(tl.load(row + 0).to(INTS) + lane, row_in_table, mask=inside)
    if tl.load(row + NUMBERS + 2) > 0:
        tl.store(tl.load(row + 1).to(INTS) + lane, key_row, mask=inside)


@triton.jit
def overlap(
    tile, extent, ratio, row, batch, SCAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Raw rows of the previous and the own window of each closing CSA window, in token order."""
    lane = tile * ROWS + tl.arange(0, ROWS)
    source_ptr = tl.load(row + 0).to(INTS)
    ring_rows = tl.load(row + NUMBERS + 0).to(tl.int32)
    num_state_rows = tl.load(row + NUMBERS + 1).to(tl.int32)
    request, slot, committed, entry, valid = find_closing(lane, batch, ratio, SCAN)
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
        mask = (lane < extent)[:, None] & (column < 2 * ratio)
        tl.store(source_ptr + place, source, mask=mask)


@triton.jit
def fold(
    tile, extent, ratio, row, batch, max_query,
    SCAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Segments [0, E) fold a closing window up to its last token, segments [E, E + B) what this forward puts out of a
    rollback's reach. `extent`: E."""
    source_ptr, position_ptr = tl.load(row + 0).to(INTS), tl.load(row + 1).to(INTS)
    in_place = tl.load(row + NUMBERS + 0).to(tl.int32)
    num_state_rows = tl.load(row + NUMBERS + 1).to(tl.int32)
    segment = tile * ROWS + tl.arange(0, ROWS)
    inside = segment < extent + batch[4]
    closes = segment < extent
    closing_request, _slot, _committed, entry, closing = find_closing(
        tl.where(closes, segment, NEVER), batch, ratio, SCAN
    )
    request = tl.where(closes, closing_request, segment - extent)
    slot, committed, query = load_requests(request, batch)
    start = tl.load(batch[1] + request, mask=inside, other=0)
    folded = tl.maximum(committed + query - in_place, 0)
    begin = ratio * tl.where(closes, entry, folded // ratio)
    end = tl.where(closes, begin + ratio, folded)
    valid = tl.where(closes, closing, slot >= 0)
    tl.store(tl.load(row + 2).to(INTS) + segment, begin, mask=inside)
    tl.store(tl.load(row + 3).to(INTS) + segment, tl.where(valid, slot, -1), mask=inside)
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
        tl.store(source_ptr + place, source, mask=mask)
        tl.store(position_ptr + place, position, mask=mask)


@triton.jit
def last_rows(row, batch, SCAN: tl.constexpr):
    """Token row of each request's newest token, -1 for idle ones."""
    for first in range(0, batch[4], SCAN):
        b = first + tl.arange(0, SCAN)
        inside = b < batch[4]
        query = tl.load(batch[2] + b, mask=inside, other=0)
        start = tl.load(batch[1] + b, mask=inside, other=0)
        tl.store(
            tl.load(row + 0).to(INTS) + b, tl.where(query > 0, start + query - 1, -1), mask=inside
        )


@triton.jit
def accumulators(ratio, row, batch, SCAN: tl.constexpr):
    """Where each request's HCA accumulator goes, the tokens it has folded then, and the request's closing windows."""
    loc_ptr, folded_ptr = tl.load(row + 0).to(INTS), tl.load(row + 1).to(INTS)
    indptr_ptr = tl.load(row + 2).to(INTS)
    in_place = tl.load(row + NUMBERS + 0).to(tl.int32)
    total = batch[4] * 0
    tl.store(indptr_ptr, total)
    for first in range(0, batch[4], SCAN):
        b = first + tl.arange(0, SCAN)
        inside = b < batch[4]
        slot, committed, query = load_requests(b, batch)
        closed, end = closing_ends(b, total, batch, ratio)
        tl.store(loc_ptr + b, tl.where(query > 0, slot, -1), mask=inside)
        tl.store(folded_ptr + b, tl.maximum(committed + query - in_place, 0), mask=inside)
        tl.store(indptr_ptr + b + 1, end, mask=inside)
        total += tl.sum(closed, 0)
