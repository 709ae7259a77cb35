"""One fill: runs the address functions of `fill_ref` once each and puts their results into fixed buffers.

Legend as there: T tokens, B requests, E closing windows, S fold segments, J fold steps, M pooled tokens, K picks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata import fill_ref as ref
from dsv4.metadata.base import FillKernel
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, plan_keys, rope_names, stream_keys
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import (
    FoldPlan,
    IndexStream,
    OverlapPlan,
    PlanKey,
    RopeKey,
    RopeTable,
    StreamKey,
)
from dsv4.metadata.rope import inverse_frequencies, rope_table
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PagedRows, PoolGeometry


@frozen(kw_only=True, eq=False)
class _Compressed:
    """The part of SharedTensors that there is once per compressor plan; fields as documented there."""

    num_visible: dict[int, Tensor] = field(factory=dict)
    state_plans: dict[PlanKey, OverlapPlan | FoldPlan] = field(factory=dict)
    entry_locs: dict[int, Tensor] = field(factory=dict)
    index_locs: dict[int, Tensor] = field(factory=dict)


class TorchFill(FillKernel):
    """In plain torch."""

    def __init__(
        self, model: ModelConfig, geometry: PoolGeometry, pool: KVPool, buffers: Buffers
    ) -> None:
        self._model, self._geometry, self._pool, self._buffers = model, geometry, pool, buffers
        self._rope_names = rope_names(model)
        self._frequencies: Mapping[RopeKey, Tensor] = {
            key: inverse_frequencies(key.theta, model.qk_rope_head_dim, key.yarn).to(pool.device)
            for key in self._rope_names
        }
        self._base_of_plan = {
            PlanKey.of(x): self._frequencies[RopeKey.of(x)] for x in model.layers if x.ratio
        }

    def fill(self, shape: BatchShape) -> SharedTensors:
        buffers, in_place_tokens = self._buffers, self._geometry.in_place_tokens
        buffers.computed.clear()
        put = buffers.put
        inputs = ref.live_requests(
            buffers.view("slots", shape.num_requests + 1),
            buffers.view("starts", shape.num_requests + 1),
            buffers.view("query_lengths", shape.num_requests + 1),
            self._pool.lengths,
        )
        tokens = ref.plan_tokens(inputs, shape, in_place_tokens)
        swa_loc_T = put("swa_loc", ref.swa_loc(tokens, self._geometry))
        tail_loc_T = None
        if shape.max_query_tokens > in_place_tokens:
            tail_loc_T = put("tail_loc", torch.where(tokens.fresh_T, swa_loc_T, -1))
        compressed = self._compressed(inputs, tokens, shape)
        streams, lanes = self._entry_streams(tokens, compressed.num_visible, shape)
        return SharedTensors(
            shape=shape,
            slots_B=buffers.view("slots", shape.num_requests),
            token_ids_T=buffers.view("token_ids", shape.num_tokens),
            request_T=put("request", tokens.request_T),
            slot_T=put("slot", tokens.slot_T),
            positions_T=put("positions", tokens.positions_T),
            swa_loc_T=swa_loc_T,
            store_loc_T=put("store_loc", torch.where(tokens.fresh_T, -1, swa_loc_T)),
            tail_loc_T=tail_loc_T,
            window_stream=self._window(tokens, shape),
            entry_streams=streams,
            select_lanes=lanes,
            num_visible=compressed.num_visible,
            state_plans=compressed.state_plans,
            entry_locs=compressed.entry_locs,
            index_locs=compressed.index_locs,
            ropes={
                key: self._rope(name, tokens.positions_T, self._frequencies[key])
                for key, name in self._rope_names.items()
            },
            last_row_B=put("last_row", ref.last_rows(inputs)),
        )

    def _compressed(
        self, inputs: ref.RequestInputs, tokens: ref.TokenPlan, shape: BatchShape
    ) -> _Compressed:
        made, put = _Compressed(), self._buffers.put
        for key in plan_keys(self._model):
            ratio = key.ratio
            visible_T = ref.visible_entries(tokens, ratio)
            made.num_visible[ratio] = put(f"{key.name}.visible", visible_T)
            closing = ref.closing_windows(inputs, ratio, shape.max_closing(ratio))
            entry_loc_E = ref.entry_loc(inputs, closing, self._entry_rows(ratio))
            made.entry_locs[ratio] = put(f"{key.name}.entry_loc", entry_loc_E)
            if key.kind is LayerKind.CSA:
                keys = self._geometry.paged_keys(ratio, self._pool.block_table)
                index_loc_E = ref.entry_loc(inputs, closing, keys)
                made.index_locs[ratio] = put(f"{key.name}.index_loc", index_loc_E)
                made.state_plans[key] = self._overlap(key, inputs, tokens, closing, shape)
            else:
                made.state_plans[key] = self._fold(key, inputs, tokens, closing, shape)
        return made

    def _entry_rows(self, ratio: int) -> PagedRows:
        return self._geometry.paged_entries(ratio, self._pool.block_table)

    def _rope(
        self, name: str, positions: Tensor, frequencies: Tensor, prefix: str = ""
    ) -> RopeTable:
        table = rope_table(positions, frequencies)
        return RopeTable(
            self._buffers.put(f"{name}.{prefix}cos", table.cos_TP),
            self._buffers.put(f"{name}.{prefix}sin", table.sin_TP),
        )

    def _window(self, tokens: ref.TokenPlan, shape: BatchShape) -> IndexStream:
        rows = min(self._geometry.window, shape.max_length)
        indptr, indices = ref.window_stream(tokens, self._geometry, rows)
        put = self._buffers.put
        return IndexStream(put("window.indptr", indptr), put("window.indices", indices), rows)

    def _entry_streams(
        self, tokens: ref.TokenPlan, visible: Mapping[int, Tensor], shape: BatchShape
    ) -> tuple[dict[StreamKey, IndexStream], dict[StreamKey, Tensor]]:
        streams: dict[StreamKey, IndexStream] = {}
        lanes: dict[StreamKey, Tensor] = {}
        put = self._buffers.put
        for key in stream_keys(self._model):
            name, ratio, topk = key.name, key.ratio, key.topk
            width = shape.max_entries(ratio)
            if topk:
                width = min(topk, width)
                indptr, lane_TK = ref.selected_lanes(visible[ratio], width)
                lanes[key] = put(f"{name}.lanes", lane_TK)
                indices = self._buffers.view(f"{name}.indices", shape.num_tokens * width)
            else:
                indptr, rows = ref.entry_stream(
                    tokens, visible[ratio], self._entry_rows(ratio), width
                )
                indices = put(f"{name}.indices", rows)
            indptr = put(f"{name}.indptr", indptr)
            streams[key] = IndexStream(indptr, indices, width, final=topk == 0)
        return streams, lanes

    def _state_loc(self, name: str, tokens: ref.TokenPlan, rows: Tensor, ring_rows: int) -> Tensor:
        return self._buffers.put(f"{name}.state_loc", ref.ring_loc(rows, tokens, ring_rows))

    def _overlap(
        self,
        key: PlanKey,
        inputs: ref.RequestInputs,
        tokens: ref.TokenPlan,
        closing: ref.ClosingPlan,
        shape: BatchShape,
    ) -> OverlapPlan:
        geometry, put, name, ratio = self._geometry, self._buffers.put, key.name, key.ratio
        rows = geometry.overlap_row(ratio, tokens.slot_T.clamp(min=0), tokens.positions_T)
        return OverlapPlan(
            ratio=ratio,
            in_place=shape.max_query_tokens <= geometry.in_place_tokens,
            ape_row_T=put(f"{name}.ape_row", tokens.positions_T % ratio),
            state_loc_T=self._state_loc(name, tokens, rows, geometry.overlap_rows(ratio)),
            source_EM=put(f"{name}.source", ref.overlap_source(inputs, closing, ratio, geometry)),
            entry_rope=self._entry_rope(key, closing),
        )

    def _fold(
        self,
        key: PlanKey,
        inputs: ref.RequestInputs,
        tokens: ref.TokenPlan,
        closing: ref.ClosingPlan,
        shape: BatchShape,
    ) -> FoldPlan:
        geometry, put, name, ratio = self._geometry, self._buffers.put, key.name, key.ratio
        steps = shape.fold_steps(ratio, geometry.in_place_tokens)
        segments = ref.fold_segments(inputs, closing, ratio, steps, geometry)
        rows = geometry.fold_row(tokens.slot_T.clamp(min=0), tokens.positions_T)
        return FoldPlan(
            ratio=ratio,
            in_place=shape.max_query_tokens <= geometry.in_place_tokens,
            starts_B1=inputs.starts,
            closing_indptr_B1=put(f"{name}.closing_indptr", ref.closing_indptr(inputs, ratio)),
            ape_row_T=put(f"{name}.ape_row", tokens.positions_T % ratio),
            state_loc_T=self._state_loc(name, tokens, rows, geometry.in_place_tokens),
            source_SJ=put(f"{name}.source", segments.source_SJ),
            position_SJ=put(f"{name}.position", segments.position_SJ),
            start_S=put(f"{name}.start", segments.start_S),
            accumulator_row_S=put(f"{name}.accumulator_row", segments.accumulator_row_S),
            accumulator_loc_B=put(f"{name}.accumulator_loc", segments.accumulator_loc_B),
            folded_B=put(f"{name}.folded", segments.folded_B),
            entry_rope=self._entry_rope(key, closing),
        )

    def _entry_rope(self, key: PlanKey, closing: ref.ClosingPlan) -> RopeTable:
        positions_E = key.ratio * closing.entry_E
        return self._rope(key.name, positions_E, self._base_of_plan[key], prefix="entry_")
