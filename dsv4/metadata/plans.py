"""The pieces of a forward's metadata: index streams, compressor plans, rope tables.

Legend: T tokens, B requests, E windows that may close in this forward, S fold segments (E closing + B accumulators),
J fold steps, M state rows that an overlapping window reads (2 * ratio), N stream lanes, K picks of select, D head dim,
P half the rope width.
int32 everywhere; -1 = no row. A row index >= the state's rows addresses this forward's own token `index - rows`.
"""

from __future__ import annotations

from typing import NamedTuple

from attrs import field, frozen
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, YarnConfig
from dsv4.pool.base import KVView
from dsv4.pool.geometry import PagedRows


class PlanKey(NamedTuple):
    """What compressors of several layers have in common: one plan serves them all."""

    kind: LayerKind
    ratio: int

    @classmethod
    def of(cls, layer: LayerConfig) -> PlanKey:
        return cls(layer.kind, layer.ratio)

    @property
    def name(self) -> str:
        """Prefix of the plan's buffers."""
        return f"{self.kind.value}.{self.ratio}"


class StreamKey(NamedTuple):
    """What entry streams of several layers have in common."""

    ratio: int
    topk: int
    """Entries that select picks (CSA); 0 = all visible ones (HCA)."""

    @classmethod
    def of(cls, layer: LayerConfig) -> StreamKey:
        return cls(layer.ratio, layer.index_topk)

    @property
    def name(self) -> str:
        """Prefix of the stream's buffers."""
        return f"entries.{self.ratio}.{self.topk}"


class RopeKey(NamedTuple):
    """One rotary base."""

    theta: float
    yarn: YarnConfig | None

    @classmethod
    def of(cls, layer: LayerConfig) -> RopeKey:
        return cls(layer.rope_theta, layer.yarn)


@frozen(eq=False)
class RopeTable:
    """cos and sin [tokens, P] fp32 of the angles position * inverse frequency."""

    cos_TP: Tensor
    sin_TP: Tensor
    derived: dict[object, tuple[Tensor, Tensor]] = field(factory=dict, repr=False)
    """Other forms of the table that a kernel made: once per forward."""


@frozen(eq=False)
class IndexStream:
    """Ragged row lists: token t reads `indices[indptr[t] : indptr[t + 1]]`."""

    indptr_T1: Tensor
    """True prefix sums."""
    indices_N: Tensor
    """Lanes behind the last token's hold -1."""
    max_rows: int
    """Capacity of one token's list in this batch shape."""
    final: bool = True
    """Whether indices are final after fill, the same for all layers; False: select writes them, layer by layer."""
    derived: dict[object, object] = field(factory=dict, repr=False)
    """What a kernel made of a final stream, the same for all layers: made once per forward."""


@frozen(eq=False)
class Source:
    """One attention segment: a table, optionally this forward's fresh rows behind it, and a stream of row indices."""

    view: KVView
    stream: IndexStream
    fresh_TD: Tensor | None = None
    """In the row format's value dtype; row
    `view.num_rows + t` is token t's KV exactly as reading its stored row back would give it."""


@frozen(kw_only=True, eq=False)
class OverlapPlan:
    """CSA (main and indexer compressor alike): pool 2 * ratio raw rows per closing window."""

    ratio: int
    in_place: bool
    """No request has more than D new tokens: no row that is read for an entry is written by this forward."""
    ape_row_T: Tensor
    """position % ratio of each token."""
    state_loc_T: Tensor
    """Ring row each token's raw projection goes to, -1 for all but the slot's last overlap_rows tokens."""
    source_EM: Tensor
    """State row, or rows + own token, of each pooled token in token order; -1 = before the sequence."""
    entry_rope: RopeTable
    """At position ratio * entry."""


@frozen(kw_only=True, eq=False)
class FoldPlan:
    """HCA: fold tokens in order. Segments [0, E) close a window each, segments [E, E + B) advance an accumulator."""

    ratio: int
    in_place: bool
    """As in OverlapPlan; here it says that each accumulator's segments are short."""
    starts_B1: Tensor
    """First token of each request; the last element is the number of real tokens."""
    closing_indptr_B1: Tensor
    """Closing windows [indptr[b], indptr[b + 1]) are request b's; lanes behind the last close nothing."""
    ape_row_T: Tensor
    state_loc_T: Tensor
    source_SJ: Tensor
    """Raw row, or rows + own token, of the tokens a segment may fold, in token order."""
    position_SJ: Tensor
    """Their positions; tokens below the accumulator's own count are folded already."""
    start_S: Tensor
    """First position of the segment's window: an accumulator counts only if it holds more than this."""
    accumulator_row_S: Tensor
    """Row of the slot's accumulator, -1 = none."""
    accumulator_loc_B: Tensor
    """Row the advanced accumulator is written to."""
    folded_B: Tensor
    """Tokens of the sequence the advanced accumulator has folded: all that can no longer be rolled back."""
    entry_rope: RopeTable


@frozen(kw_only=True, eq=False)
class CompressorTarget:
    """Where one compressor of one layer keeps its state and puts its entries."""

    state_view: KVView
    entry_view: KVView
    entry_loc_E: Tensor
    """Row each closing window's entry is written to, -1 = none closes."""
    pooled_EC: Tensor
    """Scratch fp32 [E, at least row_dim] for pooled entries on their way to the table."""
    accumulator_view: KVView | None = None
    """HCA only."""


@frozen(kw_only=True, eq=False)
class ScoreInputs:
    """What the indexer's scorer reads."""

    view: KVView
    keys: PagedRows
    slot_T: Tensor
    num_visible_T: Tensor
    max_entries: int
    """Width of a score row: capacity of this batch shape."""
    query_lengths: tuple[int, ...]
    """Host copy, see BatchShape."""
    request_slots_B: Tensor
    tile_tokens: int
    """Tokens per score tile, from the byte budget."""
    derived: dict[object, Tensor] = field(factory=dict, repr=False)
    """What a kernel made of these inputs, the same for all layers: made once per forward."""


@frozen(kw_only=True, eq=False)
class SelectOutput:
    """Where select writes: the tail of the CSA stream, whose indptr is final after fill."""

    stream: IndexStream
    scratch: Tensor
    """Flat int32, see `dsv4.metadata.buffers.select_scratch`."""
    lane_TK: Tensor
    """Stream lane of pick k of token t. Picks beyond a token's count own the lanes behind the last token's, so that
    writing the whole [T, K] table writes every lane exactly once."""
    rows: PagedRows


@frozen(kw_only=True, eq=False)
class Workspace:
    """Scratch that one forward shares between its layers; allocated once from capacities."""

    fresh_TD: Tensor | None
    """KV of this forward's tokens, [T, head_dim] in the row format's value dtype; None where the batch shape allows no
    chunk."""
    scores: Tensor
    """Flat fp32 scratch of the score byte budget."""
    pooled: Tensor
    """Flat fp32 scratch for pooled entries on their way to a table."""
    select: Tensor
    """Flat int32 scratch, see `dsv4.metadata.buffers.select_scratch`."""
    partials: Tensor
    """Flat fp32 scratch for split rows of attend, see `dsv4.metadata.buffers.partial_rows`."""

    def pooled_rows(self, num_entries: int, width: int) -> Tensor:
        """[num_entries, width] of the scratch for pooled entries."""
        return self.pooled[: num_entries * width].view(num_entries, width)

    def score_tile(self, num_tokens: int, num_entries: int) -> Tensor:
        """[num_tokens, num_entries] of the score scratch."""
        return self.scores[: num_tokens * num_entries].view(num_tokens, num_entries)


@frozen(kw_only=True, eq=False)
class LayerTensors:
    """Backing of a LayerMetadata; fields as documented there."""

    positions_T: Tensor
    store_loc_T: Tensor
    tail_loc_T: Tensor | None
    window_view: KVView
    rope: RopeTable
    sources: tuple[Source, ...]
    workspace: Workspace
    state_plan: OverlapPlan | FoldPlan | None = None
    main: CompressorTarget | None = None
    index: CompressorTarget | None = None
    score_inputs: ScoreInputs | None = None
    select_output: SelectOutput | None = None
