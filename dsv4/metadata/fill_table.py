"""What fill's one launch consists of: its sections, each a range of programs that writes some buffers.

A section's row of the device table holds the addresses of its buffers, then its numbers; both never change. What the
batch shape decides is one number per section, its extent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from attrs import frozen
from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, plan_keys, rope_names, stream_keys
from dsv4.metadata.plans import PlanKey, RopeKey, StreamKey
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
Extent = Callable[[BatchShape, Closing], int]


@frozen(kw_only=True, eq=False)
class Section:
    """One range of programs. Buffers, inputs and numbers stand in the order that its device function knows."""

    kind: Kind
    buffers: tuple[str, ...]
    """Names of what it writes."""
    numbers: tuple[int, ...] = ()
    extent: Extent
    """What the batch shape says of it: most rows of a token, or rows to write."""
    inputs: tuple[Tensor, ...] = ()
    """Tensors that it reads, addressed behind the buffers."""

    def row(self, buffers: Buffers) -> list[int]:
        """Of the device table."""
        addresses = [buffers.tensors[name].data_ptr() for name in self.buffers]
        addresses += [tensor.data_ptr() for tensor in self.inputs]
        spare = [0] * (MAX_BUFFERS - len(addresses))
        return [*addresses, *spare, *self.numbers, *[0] * (MAX_NUMBERS - len(self.numbers))]


def _num_tokens(shape: BatchShape, _closing: Closing) -> int:
    return shape.num_tokens


def _closing_of(ratio: int) -> Extent:
    return lambda _shape, closing: closing[ratio]


def width(key: StreamKey, shape: BatchShape) -> int:
    """Most entries of a token in a stream."""
    visible = shape.max_entries(key.ratio)
    return min(key.topk, visible) if key.topk else visible


def _width_of(key: StreamKey) -> Extent:
    return lambda shape, _closing: width(key, shape)


def _stream_sections(model: ModelConfig, geometry: PoolGeometry) -> list[Section]:
    window, found = geometry.window, []
    rings = (geometry.ring_rows, geometry.in_place_tokens, geometry.window_rows)
    found.append(
        Section(
            kind=Kind.WINDOW,
            buffers=("window.indptr", "window.indices"),
            numbers=(1, window, *rings),  # as entries of one token each
            extent=lambda shape, _closing: min(window, shape.max_length),
        )
    )
    for key in stream_keys(model):
        pages = (geometry.rows_per_page(key.ratio), geometry.entry_base)
        found.append(
            Section(
                kind=Kind.LANES if key.topk else Kind.ENTRIES,
                buffers=(f"{key.name}.indptr", f"{key.name}.{'lanes' if key.topk else 'indices'}"),
                numbers=(key.ratio, key.topk or NO_CAP, *pages),
                extent=_width_of(key),
            )
        )
    return found


def _token_sections(
    model: ModelConfig, geometry: PoolGeometry, frequencies: Mapping[RopeKey, Tensor]
) -> list[Section]:
    in_place, half = geometry.in_place_tokens, model.qk_rope_head_dim // 2
    basic = Section(
        kind=Kind.TOKENS,
        buffers=("request", "slot", "positions", "swa_loc", "store_loc", TAIL),
        numbers=(geometry.ring_rows, in_place),
        extent=lambda shape, _closing: int(shape.max_query_tokens > in_place),
    )
    ropes = [
        Section(
            kind=Kind.ROPE,
            buffers=(f"{name}.cos", f"{name}.sin"),
            inputs=(frequencies[key],),
            numbers=(half,),
            extent=_num_tokens,
        )
        for key, name in rope_names(model).items()
    ]
    return [basic, *ropes]


def _state_rows(plan: PlanKey, geometry: PoolGeometry) -> int:
    """Raw rows of a slot in the plan's state."""
    overlaps = plan.kind is LayerKind.CSA
    return geometry.overlap_rows(plan.ratio) if overlaps else geometry.in_place_tokens


def _plan_sections(
    plan: PlanKey, geometry: PoolGeometry, half: int, frequencies_P: Tensor
) -> list[Section]:
    """What CSA and HCA plans have in common."""
    ratio, name, keys = plan.ratio, plan.name, plan.kind is LayerKind.CSA
    closing = _closing_of(ratio)
    return [
        Section(
            kind=Kind.COMPRESSED_TOKENS,
            buffers=(f"{name}.visible", f"{name}.ape_row", f"{name}.state_loc"),
            numbers=(ratio, _state_rows(plan, geometry)),
            extent=_num_tokens,
        ),
        Section(
            kind=Kind.ENTRY_ROPE,
            buffers=(f"{name}.entry_cos", f"{name}.entry_sin"),
            inputs=(frequencies_P,),
            numbers=(half, ratio),
            extent=closing,
        ),
        Section(
            kind=Kind.ENTRY_LOC,
            buffers=(f"{name}.entry_loc", *[f"{name}.index_loc"] * keys),
            numbers=(ratio, geometry.rows_per_page(ratio), geometry.entry_base, int(keys)),
            extent=closing,
        ),
    ]


def _state_sections(plan: PlanKey, geometry: PoolGeometry) -> list[Section]:
    """What the kinds differ in."""
    ratio, name, state_rows = plan.ratio, plan.name, _state_rows(plan, geometry)
    numbers = (ratio, state_rows, geometry.max_requests * state_rows)
    closing = _closing_of(ratio)
    if plan.kind is LayerKind.CSA:
        source = (f"{name}.source",)
        return [
            Section(kind=Kind.OVERLAP, buffers=source, numbers=numbers, extent=closing),
        ]
    segments = ("source", "position", "start", "accumulator_row")
    requests = ("accumulator_loc", "folded", "closing_indptr")
    return [
        Section(
            kind=Kind.FOLD,
            buffers=tuple(f"{name}.{part}" for part in segments),
            numbers=numbers,
            extent=closing,
        ),
        Section(
            kind=Kind.ACCUMULATORS,
            buffers=tuple(f"{name}.{part}" for part in requests),
            numbers=numbers,
            extent=closing,
        ),
    ]


def make_sections(
    model: ModelConfig, geometry: PoolGeometry, frequencies: Mapping[RopeKey, Tensor]
) -> tuple[Section, ...]:
    """All of a model, by kind: the one with the most lanes starts first, and models with the same kinds share the
    compiled kernel."""
    half = model.qk_rope_head_dim // 2
    rope_of = {PlanKey.of(x): RopeKey.of(x) for x in model.layers if x.ratio}
    found = _stream_sections(model, geometry) + _token_sections(model, geometry, frequencies)
    found.append(Section(kind=Kind.LAST_ROWS, buffers=("last_row",), extent=_num_tokens))
    for plan in plan_keys(model):
        found += _plan_sections(plan, geometry, half, frequencies[rope_of[plan]])
        found += _state_sections(plan, geometry)
    return tuple(sorted(found, key=lambda section: section.kind))


def num_sections(model: ModelConfig) -> int:
    """Without a pool to address."""
    plans = plan_keys(model)
    own = sum(4 if plan.kind is LayerKind.CSA else 5 for plan in plans)
    return 3 + len(stream_keys(model)) + len(rope_names(model)) + own
