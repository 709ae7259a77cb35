"""Fill in plain torch: every shared tensor of a forward from slots, query starts and live lengths.

Legend: T tokens, B requests, E closing windows, S fold segments, J fold steps, M pooled tokens, N stream lanes,
K picks.
Shapes depend on the BatchShape alone; values live on the device. A request index of B is the sentinel behind the last
request: slot -1, no tokens. All results are int32, -1 = no row.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from dsv4.metadata.batch import BatchShape
from dsv4.pool.geometry import PagedRows, PoolGeometry, num_visible


@frozen(kw_only=True, eq=False)
class RequestInputs:
    """The static input buffers, each with one sentinel request behind the last."""

    slots: Tensor
    """[B + 1]"""
    starts: Tensor
    """[B + 1] first token of each request; the sentinel's is the number of real tokens."""
    query_lengths: Tensor
    """[B + 1]"""
    lengths: Tensor
    """[B + 1] committed tokens of each request's slot, 0 where there is none."""


@frozen(kw_only=True, eq=False)
class TokenPlan:
    request_T: Tensor
    slot_T: Tensor
    positions_T: Tensor
    committed_T: Tensor
    """L of the token's slot."""
    from_end_T: Tensor
    """Tokens of the same request from this one to its last, itself included."""
    fresh_T: Tensor
    """bool: the token belongs to a chunk (query length > D)."""
    valid_T: Tensor
    """bool: the token belongs to a live slot."""


def live_requests(
    slots: Tensor, starts: Tensor, query_lengths: Tensor, lengths: Tensor
) -> RequestInputs:
    """Reads the pool's lengths of THIS forward; padding requests have length 0 and no tokens of their own."""
    alive = slots >= 0
    committed = torch.where(alive, lengths[slots.clamp(min=0).long()], 0)
    return RequestInputs(slots=slots, starts=starts, query_lengths=query_lengths, lengths=committed)


def plan_tokens(inputs: RequestInputs, shape: BatchShape, in_place_tokens: int) -> TokenPlan:
    """Token -> request by search over the ragged starts: exact for any query lengths, idle requests included."""
    token_T = torch.arange(shape.num_tokens, dtype=torch.int32, device=inputs.slots.device)
    ends = inputs.starts[1:].contiguous()
    request_T = torch.searchsorted(ends, token_T, right=True, out_int32=True)
    at = request_T.long()
    slot_T, query_T, committed_T = inputs.slots[at], inputs.query_lengths[at], inputs.lengths[at]
    valid_T = slot_T >= 0
    local_T = token_T - inputs.starts[at]
    return TokenPlan(
        request_T=request_T,
        slot_T=slot_T,
        positions_T=torch.where(valid_T, committed_T + local_T, 0),
        committed_T=committed_T,
        from_end_T=query_T - local_T,
        fresh_T=valid_T & (query_T > in_place_tokens),
        valid_T=valid_T,
    )


def ring_loc(rows: Tensor, tokens: TokenPlan, ring_rows: int) -> Tensor:
    """Row per token, -1 for padding and for all but the last `ring_rows` tokens of a slot: an older one would share
    its row with a newer one."""
    return torch.where(tokens.valid_T & (tokens.from_end_T <= ring_rows), rows, -1)


def swa_loc(tokens: TokenPlan, geometry: PoolGeometry) -> Tensor:
    """The window-ring row each token writes."""
    rows = geometry.window_row(tokens.slot_T.clamp(min=0), tokens.positions_T)
    return ring_loc(rows, tokens, geometry.ring_rows)


def prefix_sums(counts: Tensor) -> Tensor:
    """[n] -> int32 [n + 1], starting at 0."""
    sums = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=sums[1:])
    return sums


def _lanes(indptr: Tensor, num_lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each lane of a ragged stream: owner (clamped), offset within the owner's list, and whether it is used."""
    lane_N = torch.arange(num_lanes, dtype=torch.int32, device=indptr.device)
    owner_N = torch.searchsorted(indptr[1:].contiguous(), lane_N, right=True).clamp_(
        max=max(indptr.shape[0] - 2, 0)
    )
    return owner_N, lane_N - indptr[owner_N], lane_N < indptr[-1]


def window_stream(
    tokens: TokenPlan, geometry: PoolGeometry, max_rows: int
) -> tuple[Tensor, Tensor]:
    """(indptr, indices): the window of each token in position order. A chunk's own tokens are fresh rows, everything
    older, and everything of an in-place token, lies in the ring."""
    count_T = torch.where(tokens.valid_T, (tokens.positions_T + 1).clamp(max=geometry.window), 0)
    indptr = prefix_sums(count_T)
    owner_N, offset_N, used_N = _lanes(indptr, count_T.shape[0] * max_rows)
    back_N = count_T[owner_N] - 1 - offset_N  # distance to the query token
    position_N = tokens.positions_T[owner_N] - back_N
    fresh_N = tokens.fresh_T[owner_N] & (position_N >= tokens.committed_T[owner_N])
    fresh_row_N = geometry.window_rows + owner_N.int() - back_N
    ring_row_N = geometry.window_row(tokens.slot_T[owner_N].clamp(min=0), position_N)
    row_N = torch.where(fresh_N, fresh_row_N, ring_row_N)
    return indptr, torch.where(used_N, row_N, -1)


def entry_stream(
    tokens: TokenPlan, visible_T: Tensor, rows: PagedRows, max_rows: int
) -> tuple[Tensor, Tensor]:
    """(indptr, indices): all visible entries of each token, ascending (HCA)."""
    indptr = prefix_sums(visible_T)
    owner_N, entry_N, used_N = _lanes(indptr, visible_T.shape[0] * max_rows)
    row_N = rows.rows(tokens.slot_T[owner_N], entry_N)
    return indptr, torch.where(used_N, row_N, -1)


def selected_lanes(visible_T: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(indptr, lane [T, K]) of a stream that select fills: token t owns min(K, n_vis) lanes; its other picks own the
    lanes behind the last token's, so all T * K lanes have exactly one writer."""
    count_T = visible_T.clamp(max=topk)
    indptr = prefix_sums(count_T)
    pick_K = torch.arange(topk, dtype=torch.int32, device=visible_T.device)
    token_T = torch.arange(visible_T.shape[0], dtype=torch.int32, device=visible_T.device)
    used_TK = pick_K < count_T.unsqueeze(1)
    own_TK = indptr[:-1].unsqueeze(1) + pick_K
    unused_before_T = token_T * topk - indptr[:-1]
    spare_TK = indptr[-1] + unused_before_T.unsqueeze(1) + (pick_K - count_T.unsqueeze(1))
    return indptr, torch.where(used_TK, own_TK, spare_TK)


@frozen(kw_only=True, eq=False)
class ClosingPlan:
    """Windows of one ratio that close in this forward."""

    request_E: Tensor
    """B where lane e closes nothing."""
    entry_E: Tensor
    valid_E: Tensor


def closing_counts(inputs: RequestInputs, ratio: int) -> Tensor:
    """[B + 1] windows of each request that close in this forward."""
    closed_B = (inputs.lengths + inputs.query_lengths) // ratio - inputs.lengths // ratio
    return torch.where(inputs.slots >= 0, closed_B, 0)


def closing_indptr(inputs: RequestInputs, ratio: int) -> Tensor:
    """[B + 1] prefix sums of the closing windows over the requests."""
    return prefix_sums(closing_counts(inputs, ratio)[:-1])


def closing_windows(inputs: RequestInputs, ratio: int, max_closing: int) -> ClosingPlan:
    """Window w of a request closes iff its last token is one of this forward's."""
    if max_closing == 0:
        none = torch.empty(0, dtype=torch.int32, device=inputs.slots.device)
        return ClosingPlan(request_E=none.long(), entry_E=none, valid_E=none.bool())
    first_B = inputs.lengths // ratio
    count_B = closing_counts(inputs, ratio)
    ends_B = torch.cumsum(count_B, 0, dtype=torch.int32)
    lane_E = torch.arange(max_closing, dtype=torch.int32, device=first_B.device)
    sentinel = inputs.slots.shape[0] - 1
    request_E = torch.searchsorted(ends_B, lane_E, right=True).clamp_(max=sentinel)
    entry_E = first_B[request_E] + lane_E - (ends_B - count_B)[request_E]
    valid_E = lane_E < ends_B[-1]
    return ClosingPlan(
        request_E=torch.where(valid_E, request_E, sentinel),
        entry_E=torch.where(valid_E, entry_E, 0),
        valid_E=valid_E,
    )


def entry_loc(inputs: RequestInputs, closing: ClosingPlan, rows: PagedRows) -> Tensor:
    """Row that each closing window's entry is written to."""
    if closing.entry_E.shape[0] == 0:
        return closing.entry_E
    row_E = rows.rows(inputs.slots[closing.request_E], closing.entry_E)
    return torch.where(closing.valid_E, row_E, -1)


def own_or_state(
    inputs: RequestInputs, request: Tensor, position: Tensor, state_row: Tensor, num_state_rows: int
) -> Tensor:
    """Index of a token's raw row: own projection row behind the state's rows if the token is of this forward, else its
    state row; -1 before the sequence."""
    local = position - inputs.lengths[request]
    source = torch.where(local >= 0, num_state_rows + inputs.starts[request] + local, state_row)
    return torch.where(position >= 0, source, -1)


def overlap_source(
    inputs: RequestInputs, closing: ClosingPlan, ratio: int, geometry: PoolGeometry
) -> Tensor:
    """[E, M] raw rows of the previous and the own window of each closing CSA window, in token order."""
    if closing.entry_E.shape[0] == 0:
        return closing.entry_E.new_empty(0, 2 * ratio)
    offset_M = torch.arange(2 * ratio, dtype=torch.int32, device=inputs.slots.device)
    position_EM = ratio * (closing.entry_E.unsqueeze(1) - 1) + offset_M
    request_E1 = closing.request_E.unsqueeze(1)
    slot_E1 = inputs.slots[request_E1].clamp(min=0)
    ring_EM = geometry.overlap_row(ratio, slot_E1, position_EM)
    num_rows = geometry.max_requests * geometry.overlap_rows(ratio)
    source_EM = own_or_state(inputs, request_E1, position_EM, ring_EM, num_rows)
    return torch.where(closing.valid_E.unsqueeze(1), source_EM, -1)


@frozen(kw_only=True, eq=False)
class FoldSegments:
    source_SJ: Tensor
    position_SJ: Tensor
    start_S: Tensor
    accumulator_row_S: Tensor
    accumulator_loc_B: Tensor
    folded_B: Tensor


def fold_segments(
    inputs: RequestInputs, closing: ClosingPlan, ratio: int, steps: int, geometry: PoolGeometry
) -> FoldSegments:
    """Closing windows fold up to their last token; each accumulator folds what this forward makes final: tokens below
    length + query length - D, which no rollback can reach any more."""
    in_place, num_requests = geometry.in_place_tokens, inputs.slots.shape[0] - 1
    lengths_B, device = inputs.lengths[:-1], inputs.slots.device
    folded_B = (lengths_B + inputs.query_lengths[:-1] - in_place).clamp(min=0)
    request_B = torch.arange(num_requests, device=device)
    # a finished window needs no accumulator: the segment of a folded count on a window border is empty
    start_S = ratio * torch.cat([closing.entry_E, folded_B // ratio])
    end_S = torch.cat([start_S[: closing.entry_E.shape[0]] + ratio, folded_B])
    request_S = torch.cat([closing.request_E, request_B])
    valid_S = torch.cat([closing.valid_E, inputs.slots[:-1] >= 0])
    # older tokens are in the accumulator: only the D raw rows may still be missing from it
    first_S = torch.maximum(start_S, inputs.lengths[request_S] - in_place)
    step_J = torch.arange(steps, dtype=torch.int32, device=device)
    position_SJ = first_S.unsqueeze(1) + step_J
    slot_S = inputs.slots[request_S]
    raw_SJ = geometry.fold_row(slot_S.clamp(min=0).unsqueeze(1), position_SJ)
    num_rows = geometry.max_requests * in_place
    source_SJ = own_or_state(inputs, request_S.unsqueeze(1), position_SJ, raw_SJ, num_rows)
    live_SJ = valid_S.unsqueeze(1) & (position_SJ < end_S.unsqueeze(1))
    accumulator_row_S = torch.where(valid_S, slot_S, -1)
    busy_B = (inputs.slots[:-1] >= 0) & (inputs.query_lengths[:-1] > 0)
    return FoldSegments(
        source_SJ=torch.where(live_SJ, source_SJ, -1),
        position_SJ=position_SJ,
        start_S=start_S,
        accumulator_row_S=accumulator_row_S,
        accumulator_loc_B=torch.where(busy_B, inputs.slots[:-1], -1),
        folded_B=folded_B,
    )


def last_rows(inputs: RequestInputs) -> Tensor:
    """Token row of each request's newest token, -1 for idle ones."""
    ends_B = inputs.starts[:-1] + inputs.query_lengths[:-1]
    return torch.where(inputs.query_lengths[:-1] > 0, ends_B - 1, -1)


def visible_entries(tokens: TokenPlan, ratio: int) -> Tensor:
    """n_vis of each token; 0 for padding."""
    return torch.where(tokens.valid_T, num_visible(tokens.positions_T, ratio), 0).int()
