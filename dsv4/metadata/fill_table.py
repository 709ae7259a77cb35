"""What fill's one launch consists of: its sections, each a range of programs that writes some buffers.

A section's row of the device table holds the addresses of its buffers, then its numbers; both never change. What the
batch shape decides is one number per section, its extent.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, plan_keys, rope_names, stream_keys
from dsv4.metadata.plans import PlanKey, RopeKey
from dsv4.pool.geometry import PoolGeometry

MAX_BUFFERS = 8
MAX_NUMBERS = 8
ROW = MAX_BUFFERS + MAX_NUMBERS
"""int64 numbers of a row of the table."""
NO_CAP = 2**31 - 1
TAIL = "tail_loc"
"""Written only where the shape allows chunks."""


class Kind(enum.IntEnum):
    """What a section does; the one with the most lanes comes first."""

    WINDOW = 0
    ENTRIES = 1
    LANES = 2
    TOKENS = 3
    COMPRESSED_TOKENS = 4
    ROPE = 5
    ENTRY_ROPE = 6
    ENTRY_LOC = 7
    OVERLAP = 8
    FOLD = 9
    LAST_ROWS = 10
    ACCUMULATORS = 11


Closing = Mapping[int, int]
"""By ratio: windows that may close in this forward."""


@frozen(kw_only=True, eq=False)
class Section:
    """One range of programs. Buffers, inputs and numbers stand in the order that its device function knows."""

    kind: Kind
    buffers: tuple[str, ...]
    """Names of what it writes."""
    inputs: tuple[Tensor, ...] = ()
    """Tensors that it reads, addressed behind the buffers."""
    numbers: tuple[int, ...] = ()
    ratio: int = 1
    """Tokens of an entry; the rows of a window are entries of one token."""
    cap: int = NO_CAP
    """Most rows of a token in a stream."""

    def row(self, buffers: Buffers) -> list[int]:
        """Of the device table."""
        addresses = [buffers.tensors[name].data_ptr() for name in self.buffers]
        addresses += [tensor.data_ptr() for tensor in self.inputs]
        spare = [0] * (MAX_BUFFERS - len(addresses))
        return [*addresses, *spare, *self.numbers, *[0] * (MAX_NUMBERS - len(self.numbers))]

    def extent(self, shape: BatchShape, closing: Closing) -> int:
        """Most rows of a token in a stream of this shape, most new tokens of a request, or rows to write."""
        if self.kind <= Kind.LANES:
            return min(self.cap, shape.max_entries(self.ratio))
        if self.kind is Kind.TOKENS:
            return shape.max_query_tokens
        if self.kind in (Kind.COMPRESSED_TOKENS, Kind.ROPE):
            return shape.num_tokens
        return shape.num_requests if self.kind is Kind.LAST_ROWS else closing[self.ratio]


def _stream_sections(model: ModelConfig, geometry: PoolGeometry) -> Iterator[Section]:
    yield Section(
        kind=Kind.WINDOW,
        buffers=("window.indptr", "window.indices"),
        numbers=(geometry.ring_rows, geometry.in_place_tokens, geometry.window_rows),
        cap=geometry.window,
    )
    for key in stream_keys(model):
        yield Section(
            kind=Kind.LANES if key.topk else Kind.ENTRIES,
            buffers=(f"{key.name}.indptr", f"{key.name}.{'lanes' if key.topk else 'indices'}"),
            numbers=(geometry.rows_per_page(key.ratio), geometry.entry_base),
            ratio=key.ratio,
            cap=key.topk or NO_CAP,
        )


def _token_sections(
    model: ModelConfig, geometry: PoolGeometry, frequencies: Mapping[RopeKey, Tensor]
) -> Iterator[Section]:
    yield Section(
        kind=Kind.TOKENS,
        buffers=("request", "slot", "positions", "swa_loc", "store_loc", TAIL),
        numbers=(geometry.ring_rows, geometry.in_place_tokens),
    )
    for key, name in rope_names(model).items():
        yield Section(
            kind=Kind.ROPE,
            buffers=(f"{name}.cos", f"{name}.sin"),
            inputs=(frequencies[key],),
            numbers=(model.qk_rope_head_dim // 2,),
        )


def _plan_sections(
    plan: PlanKey, geometry: PoolGeometry, half: int, frequencies_P: Tensor
) -> Iterator[Section]:
    ratio, name, csa = plan.ratio, plan.name, plan.kind is LayerKind.CSA
    state_rows = geometry.overlap_rows(ratio) if csa else geometry.in_place_tokens
    state = (state_rows, geometry.max_requests * state_rows)

    def section(kind: Kind, *parts: str, numbers: tuple[int, ...], **inputs: Any) -> Section:
        buffers = tuple(f"{name}.{part}" for part in parts)
        return Section(kind=kind, buffers=buffers, numbers=numbers, ratio=ratio, **inputs)

    yield section(Kind.COMPRESSED_TOKENS, "visible", "ape_row", "state_loc", numbers=state)
    yield section(
        Kind.ENTRY_ROPE, "entry_cos", "entry_sin", numbers=(half,), inputs=(frequencies_P,)
    )
    locs = ("entry_loc", "index_loc") if csa else ("entry_loc",)
    paged = (geometry.rows_per_page(ratio), geometry.entry_base, int(csa))
    yield section(Kind.ENTRY_LOC, *locs, numbers=paged)
    if csa:
        yield section(Kind.OVERLAP, "source", numbers=state)
    else:
        segments = ("source", "position", "start", "accumulator_row")
        yield section(Kind.FOLD, *segments, numbers=state)
        accumulators = ("accumulator_loc", "folded", "closing_indptr")
        yield section(Kind.ACCUMULATORS, *accumulators, numbers=state)


def make_sections(
    model: ModelConfig, geometry: PoolGeometry, frequencies: Mapping[RopeKey, Tensor]
) -> tuple[Section, ...]:
    """All of a model, by kind."""
    half = model.qk_rope_head_dim // 2
    rope_of = {PlanKey.of(x): RopeKey.of(x) for x in model.layers if x.ratio}
    found = [*_stream_sections(model, geometry), *_token_sections(model, geometry, frequencies)]
    found.append(Section(kind=Kind.LAST_ROWS, buffers=("last_row",)))
    for plan in plan_keys(model):
        found += _plan_sections(plan, geometry, half, frequencies[rope_of[plan]])
    return tuple(sorted(found, key=lambda section: section.kind))


def num_sections(model: ModelConfig) -> int:
    """Without a pool to address."""
    plans = sum(4 if plan.kind is LayerKind.CSA else 5 for plan in plan_keys(model))
    return 3 + len(stream_keys(model)) + len(rope_names(model)) + plans
