"""Compares a filled ForwardMetadata with `ExpectedForward`, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import (
    FoldPlan,
    IndexStream,
    OverlapPlan,
    RopeKey,
    RopeTable,
    StreamKey,
)
from dsv4.testing import reference
from dsv4.testing.expected import ExpectedForward, prefix_sums

ANGLE_TOLERANCE = 2e-4
"""cos and sin of an fp32 angle of up to a few hundred turns against float64."""


def differences(shared: SharedTensors, expected: ExpectedForward) -> list[str]:
    """Names of the tensors that are not what they must be; empty if all are."""
    return [name for name, right in _checks(shared, expected) if not right]


def _checks(shared: SharedTensors, expected: ExpectedForward) -> Iterator[tuple[str, bool]]:
    tokens, batch = expected.tokens, expected.batch
    ids = [*batch.token_ids, *[0] * (batch.num_tokens - len(batch.token_ids))]
    yield "token_ids", shared.token_ids_T.tolist() == ids
    yield "request", _equal(shared.request_T, [t.request for t in tokens])
    yield "slot", _equal(shared.slot_T, [t.slot for t in tokens])
    yield "positions", _equal(shared.positions_T, [t.position for t in tokens])
    yield "swa_loc", _equal(shared.swa_loc_T, expected.swa_loc())
    yield "store_loc", _equal(shared.store_loc_T, expected.store_loc())
    if shared.tail_loc_T is None:
        yield "tail_loc absent", max(expected.tail_loc(), default=-1) == -1
    else:
        yield "tail_loc", _equal(shared.tail_loc_T, expected.tail_loc())
    yield "last_row", _equal(shared.last_row_B, expected.last_rows())
    windows = [expected.window_list(t) for t in tokens]
    yield "window stream", _stream_equal(shared.window_stream, windows)
    for key, stream in shared.entry_streams.items():
        ratio, topk = key
        name = f"entry stream {ratio}.{topk}"
        if topk:
            yield name, _selected_equal(shared, expected, key)
        else:
            yield name, _stream_equal(stream, [expected.entry_list(t, ratio) for t in tokens])
    for ratio, visible_T in shared.num_visible.items():
        yield f"n_vis {ratio}", _equal(visible_T, [expected.visible(t, ratio) for t in tokens])
        yield (
            f"entry_loc {ratio}",
            _lanes_equal(shared.entry_locs[ratio], expected.entry_locs(ratio)),
        )
    for ratio, loc_E in shared.index_locs.items():
        yield f"index_loc {ratio}", _lanes_equal(loc_E, expected.entry_locs(ratio, base=0))
    yield from _plan_checks(shared, expected)
    yield from _rope_checks(shared, expected)


def _plan_checks(shared: SharedTensors, expected: ExpectedForward) -> Iterator[tuple[str, bool]]:
    tokens = expected.tokens
    for (kind, ratio), plan in shared.state_plans.items():
        name, closing = f"{kind.value} {ratio}", expected.closing(ratio)
        yield f"{name} ape_row", _equal(plan.ape_row_T, [t.position % ratio for t in tokens])
        state_loc = expected.state_loc(kind, ratio)
        yield f"{name} state_loc", _equal(plan.state_loc_T, state_loc)
        layer = next(x for x in expected.model.layers if (x.kind, x.ratio) == (kind, ratio))
        yield (
            f"{name} entry_rope",
            _rope_equal(
                plan.entry_rope,
                [ratio * c.entry for c in closing],
                reference.frequencies(
                    layer.rope_theta, expected.model.qk_rope_head_dim, layer.yarn
                ),
            ),
        )
        if isinstance(plan, OverlapPlan):
            none = [[-1] * 2 * ratio] * (plan.source_EM.shape[0] - len(closing))
            yield (
                f"{name} source",
                plan.source_EM.tolist() == expected.overlap_sources(ratio) + none,
            )
        else:
            yield f"{name} segments", _segments_equal(plan, expected, len(closing))


def _segments_equal(plan: FoldPlan, expected: ExpectedForward, num_closing: int) -> bool:
    """Closing windows first, lanes that close nothing behind them, the requests' accumulators last."""
    requests, live = len(expected.batch.slots), expected.fold_segments(plan.ratio)
    lanes = plan.source_SJ.shape[0] - requests
    segments = live[:num_closing] + [(-1, 0, [])] * (lanes - num_closing) + live[num_closing:]
    steps = plan.source_SJ.shape[1]
    for s, (row, start, places) in enumerate(segments):
        sources, positions = plan.source_SJ[s].tolist(), plan.position_SJ[s].tolist()
        if len(places) > steps or sources != [r for _, r in places] + [-1] * (steps - len(places)):
            return False
        if positions[: len(places)] != [p for p, _ in places]:
            return False
        if plan.accumulator_row_S[s].item() != row or (
            row >= 0 and plan.start_S[s].item() != start
        ):
            return False
    folded = [
        plan.folded_B[b].item() == expected.folded(b)
        for b, slot in enumerate(expected.batch.slots)
        if slot >= 0
    ]
    return all(folded) and _equal(plan.accumulator_loc_B, expected.accumulator_loc())


def _selected_equal(shared: SharedTensors, expected: ExpectedForward, key: StreamKey) -> bool:
    """Token t owns min(K, n_vis) lanes in stream order, and the picks of all tokens own every lane exactly once."""
    stream, lane_TK = shared.entry_streams[key], shared.select_lanes[key]
    counts = [min(key.topk, expected.visible(t, key.ratio)) for t in expected.tokens]
    indptr = prefix_sums([[0] * count for count in counts])
    owned = [
        lanes[:count] == list(range(start, start + count))
        for lanes, start, count in zip(lane_TK.tolist(), indptr[:-1], counts, strict=True)
    ]
    all_lanes = sorted(lane_TK.flatten().tolist()) == list(range(stream.indices_N.shape[0]))
    fits = max(counts, default=0) <= stream.max_rows == lane_TK.shape[1]
    return all(owned) and all_lanes and fits and _equal(stream.indptr_T1, indptr)


def _rope_checks(shared: SharedTensors, expected: ExpectedForward) -> Iterator[tuple[str, bool]]:
    positions = [t.position for t in expected.tokens]
    for layer in expected.model.layers:
        turns = reference.frequencies(layer.rope_theta, expected.model.qk_rope_head_dim, layer.yarn)
        table = shared.ropes[RopeKey.of(layer)]
        yield f"rope {layer.rope_theta}", _rope_equal(table, positions, turns)


def _rope_equal(table: RopeTable, positions: Sequence[int], turns: Sequence[float]) -> bool:
    """Rows behind the given positions belong to no token and are not looked at."""
    for index, position in enumerate(positions):
        cos, sin = table.cos_TP[index].tolist(), table.sin_TP[index].tolist()
        for pair, turn in enumerate(turns):
            angle = position * turn
            error = max(abs(cos[pair] - math.cos(angle)), abs(sin[pair] - math.sin(angle)))
            if not error <= ANGLE_TOLERANCE:
                return False
    return table.cos_TP.shape[0] >= len(positions)


def _equal(actual: Tensor, wanted: Sequence[int]) -> bool:
    return actual.dtype == torch.int32 and actual.tolist() == list(wanted)


def _lanes_equal(actual_E: Tensor, wanted: Sequence[int]) -> bool:
    """The wanted rows, and -1 in the lanes behind."""
    return _equal(actual_E, [*wanted, *[-1] * (actual_E.shape[0] - len(wanted))])


def _stream_equal(stream: IndexStream, lists: Sequence[Sequence[int]]) -> bool:
    """Each token's list at its place, -1 in the lanes behind the last token's, and max_rows not exceeded."""
    flat = [row for one in lists for row in one]
    fits = max(map(len, lists), default=0) <= stream.max_rows
    return (
        fits
        and _equal(stream.indptr_T1, prefix_sums(lists))
        and _lanes_equal(stream.indices_N, flat)
    )
