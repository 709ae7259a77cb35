"""ForwardMetadata: everything a forward's layers share. LayerMetadata: the narrow accessor of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NewType

from attrs import field, frozen
from torch import Tensor

from dsv4.errors import StaleMetadataError
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.plans import (
    CompressorTarget,
    FoldPlan,
    IndexStream,
    LayerTensors,
    OverlapPlan,
    PlanKey,
    RopeKey,
    RopeTable,
    ScoreInputs,
    SelectOutput,
    Source,
    StreamKey,
    Workspace,
)
from dsv4.pool.base import KVView

Epoch = NewType("Epoch", int)
"""Number of a fill; what was filled under another one is stale."""


@frozen(kw_only=True, eq=False)
class SharedTensors:
    """What fill computed, once, for all layers. T tokens, B requests; int32, -1 = no row."""

    shape: BatchShape
    slots_B: Tensor
    """Slot of each request, -1 = none."""
    token_ids_T: Tensor
    """int64, 0 for padding."""
    request_T: Tensor
    """Request of each token; B for padding behind the last request."""
    slot_T: Tensor
    positions_T: Tensor
    """Absolute; 0 for padding."""
    swa_loc_T: Tensor
    """Window-ring row each token writes."""
    store_loc_T: Tensor
    """swa_loc of in-place tokens: stored before attend."""
    tail_loc_T: Tensor | None
    """swa_loc of chunk tokens: stored after attend. None where the shape allows no chunk."""
    window_stream: IndexStream
    entry_streams: Mapping[StreamKey, IndexStream]
    """CSA indices are written by select, layer by layer."""
    select_lanes: Mapping[StreamKey, Tensor]
    """[T, K] per CSA stream, see SelectOutput."""
    num_visible: Mapping[int, Tensor]
    """By ratio: n_vis of each token."""
    state_plans: Mapping[PlanKey, OverlapPlan | FoldPlan]
    entry_locs: Mapping[int, Tensor]
    """By ratio: entry-table row of each closing window."""
    index_locs: Mapping[int, Tensor]
    """The same in the table of index keys (CSA)."""
    ropes: Mapping[RopeKey, RopeTable]
    """At the tokens' positions."""
    last_row_B: Tensor
    """Token row of each request's newest token, -1 for idle requests."""


class ForwardMetadata:
    """One object for the builder's life; `fill` replaces its contents and moves its epoch."""

    def __init__(self) -> None:
        self._epoch = Epoch(0)
        self._shared: SharedTensors | None = None
        self._layers: Sequence[LayerTensors] = ()

    def publish(self, shared: SharedTensors, layers: Sequence[LayerTensors]) -> Epoch:
        """What a builder filled, one item of `layers` per layer; everything published before is stale from here."""
        self._shared, self._layers = shared, layers
        self._epoch = Epoch(self._epoch + 1)
        return self._epoch

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def shared(self) -> SharedTensors:
        """The tensors of the latest fill."""
        if self._shared is None:
            raise StaleMetadataError(
                "metadata was never filled; call prepare(batch) and fill() first"
            )
        return self._shared

    @property
    def shape(self) -> BatchShape:
        return self.shared.shape

    @property
    def token_ids_T(self) -> Tensor:
        return self.shared.token_ids_T

    @property
    def positions_T(self) -> Tensor:
        return self.shared.positions_T

    @property
    def swa_loc_T(self) -> Tensor:
        return self.shared.swa_loc_T

    def for_layer(self, layer: int, epoch: Epoch) -> LayerMetadata:
        """The accessor of one layer. `epoch` is what fill returned; another one raises StaleMetadataError."""
        if epoch != self._epoch or self._shared is None:
            raise StaleMetadataError(
                f"layer {layer}: metadata is at epoch {self._epoch}, asked for {epoch}; "
                "use the epoch of the latest fill()"
            )
        return LayerMetadata(self, layer, epoch, self._layers[layer])


@frozen(eq=False)
class LayerMetadata:
    """All that one layer may know; reading it after a newer fill raises StaleMetadataError."""

    _owner: ForwardMetadata = field(repr=False)
    layer: int
    epoch: Epoch
    _tensors: LayerTensors = field(repr=False)

    def _live(self) -> LayerTensors:
        if self._owner.epoch != self.epoch:
            raise StaleMetadataError(
                f"layer {self.layer}: metadata of epoch {self.epoch} read at epoch {self._owner.epoch}; "
                "take a new accessor with for_layer() after each fill()"
            )
        return self._tensors

    @property
    def positions_T(self) -> Tensor:
        """int32 [T] absolute positions; 0 for padding."""
        return self._live().positions_T

    @property
    def store_loc_T(self) -> Tensor:
        """int32 [T] window rows to store before attend, -1 = none."""
        return self._live().store_loc_T

    @property
    def tail_loc_T(self) -> Tensor | None:
        """int32 [T] window rows to store after attend; None where no chunk can occur."""
        return self._live().tail_loc_T

    @property
    def window_view(self) -> KVView:
        """The window rings of this layer."""
        return self._live().window_view

    @property
    def state_plan(self) -> OverlapPlan | FoldPlan | None:
        """What the layer's compressors do in this forward; None for a sliding layer."""
        return self._live().state_plan

    @property
    def main(self) -> CompressorTarget | None:
        """State, entry table and entry rows of the main compressor."""
        return self._live().main

    @property
    def index(self) -> CompressorTarget | None:
        """The same of the indexer's compressor: index keys."""
        return self._live().index

    @property
    def score_inputs(self) -> ScoreInputs | None:
        """CSA only."""
        return self._live().score_inputs

    @property
    def select_output(self) -> SelectOutput | None:
        """CSA only."""
        return self._live().select_output

    @property
    def sources(self) -> tuple[Source, ...]:
        """Attention segments: window rows, then entries."""
        return self._live().sources

    @property
    def rope(self) -> RopeTable:
        """cos and sin at the tokens' positions with this layer's base."""
        return self._live().rope

    @property
    def workspace(self) -> Workspace:
        """Scratch shared by the layers of a forward."""
        return self._live().workspace
