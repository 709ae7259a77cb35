"""One fill: runs the address functions of `fill_ref` once each and puts their results into fixed buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata import fill_ref as ref
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, plan_keys, rope_names, stream_keys
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import FoldPlan, IndexStream, OverlapPlan, RopeTable
from dsv4.metadata.rope import inverse_frequencies, rope_table
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PagedRows, PoolGeometry


class Filler:
    """Fills the buffers of one builder. Has no effect on the pool."""

    def __init__(
        self, model: ModelConfig, geometry: PoolGeometry, pool: KVPool, buffers: Buffers
    ) -> None:
        self._model, self._geometry, self._pool, self._buffers = model, geometry, pool, buffers
        self._frequencies: Mapping[tuple[float, object], Tensor] = {
            (x.rope_theta, x.yarn): inverse_frequencies(
                x.rope_theta, model.qk_rope_head_dim, x.yarn
            ).to(pool.device)
            for x in model.layers
        }
        self._base_of_ratio = {
            (x.kind, x.ratio): self._frequencies[x.rope_theta, x.yarn] for x in model.layers
        }

    def entry_rows(self, ratio: int) -> PagedRows:
        return PagedRows(
            block_table=self._pool.block_table,
            rows_per_page=self._geometry.rows_per_page(ratio),
            base=self._geometry.entry_base,
        )

    def index_rows(self, ratio: int) -> PagedRows:
        return PagedRows(
            block_table=self._pool.block_table,
            rows_per_page=self._geometry.rows_per_page(ratio),
            base=0,
        )

    def fill(self, shape: BatchShape) -> SharedTensors:
        buffers, geometry, model = self._buffers, self._geometry, self._model
        buffers.computed.clear()
        put, requests = buffers.put, shape.num_requests
        inputs = ref.live_requests(
            buffers.view("slots", requests + 1),
            buffers.view("starts", requests + 1),
            buffers.view("query_lengths", requests + 1),
            self._pool.lengths,
        )
        tokens = ref.plan_tokens(inputs, shape, geometry.in_place_tokens)
        swa_loc_T = put("swa_loc", ref.swa_loc(tokens, geometry))
        chunks = shape.max_query_tokens > geometry.in_place_tokens
        visible: dict[int, Tensor] = {}
        plans: dict[tuple[str, int], OverlapPlan | FoldPlan] = {}
        entry_locs: dict[int, Tensor] = {}
        index_locs: dict[int, Tensor] = {}
        for kind, ratio in plan_keys(model):
            name = f"{kind.value}.{ratio}"
            visible[ratio] = put(f"{name}.visible", ref.visible_entries(tokens, ratio))
            closing = ref.closing_windows(inputs, ratio, shape.max_closing(ratio))
            entry_locs[ratio] = put(
                f"{name}.entry_loc", ref.entry_loc(inputs, closing, self.entry_rows(ratio))
            )
            if kind is LayerKind.CSA:
                index_locs[ratio] = put(
                    f"{name}.index_loc", ref.entry_loc(inputs, closing, self.index_rows(ratio))
                )
                plans[kind.value, ratio] = self._overlap(name, inputs, tokens, closing, ratio)
            else:
                plans[kind.value, ratio] = self._fold(name, inputs, tokens, closing, ratio, shape)
        streams, lanes = self._entry_streams(tokens, visible, shape)
        return SharedTensors(
            shape=shape,
            token_ids_T=buffers.view("token_ids", shape.num_tokens),
            request_T=put("request", tokens.request_T),
            slot_T=put("slot", tokens.slot_T),
            positions_T=put("positions", tokens.positions_T),
            swa_loc_T=swa_loc_T,
            store_loc_T=put("store_loc", torch.where(tokens.fresh_T, -1, swa_loc_T)),
            tail_loc_T=put("tail_loc", torch.where(tokens.fresh_T, swa_loc_T, -1))
            if chunks
            else None,
            window_stream=self._window(tokens, shape),
            entry_streams=streams,
            select_lanes=lanes,
            num_visible=visible,
            state_plans=plans,
            entry_locs=entry_locs,
            index_locs=index_locs,
            ropes={
                key: self._rope(name, tokens.positions_T, self._frequencies[key])
                for name, key in rope_names(model).items()
            },
            last_row_B=put("last_row", ref.last_rows(inputs)),
        )

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
    ) -> tuple[dict[tuple[int, int], IndexStream], dict[tuple[int, int], Tensor]]:
        streams: dict[tuple[int, int], IndexStream] = {}
        lanes: dict[tuple[int, int], Tensor] = {}
        put = self._buffers.put
        for ratio, topk in stream_keys(self._model):
            name, width = f"entries.{ratio}.{topk}", shape.max_entries(ratio)
            if topk:
                width = min(topk, width)
                indptr, lane_TK = ref.selected_lanes(visible[ratio], width)
                lanes[ratio, topk] = put(f"{name}.lanes", lane_TK)
                indices = self._buffers.view(f"{name}.indices", shape.num_tokens * width)
            else:
                indptr, rows = ref.entry_stream(
                    tokens, visible[ratio], self.entry_rows(ratio), width
                )
                indices = put(f"{name}.indices", rows)
            indptr = put(f"{name}.indptr", indptr)
            streams[ratio, topk] = IndexStream(indptr, indices, width, final=topk == 0)
        return streams, lanes

    def _state_loc(self, name: str, tokens: ref.TokenPlan, rows: Tensor, ring_rows: int) -> Tensor:
        return self._buffers.put(f"{name}.state_loc", ref.ring_loc(rows, tokens, ring_rows))

    def _overlap(
        self,
        name: str,
        inputs: ref.RequestInputs,
        tokens: ref.TokenPlan,
        closing: ref.ClosingPlan,
        ratio: int,
    ) -> OverlapPlan:
        geometry, put = self._geometry, self._buffers.put
        rows = geometry.overlap_row(ratio, tokens.slot_T.clamp(min=0), tokens.positions_T)
        return OverlapPlan(
            ratio=ratio,
            ape_row_T=put(f"{name}.ape_row", tokens.positions_T % ratio),
            state_loc_T=self._state_loc(name, tokens, rows, geometry.overlap_rows(ratio)),
            source_EM=put(f"{name}.source", ref.overlap_source(inputs, closing, ratio, geometry)),
            entry_rope=self._entry_rope(name, closing, LayerKind.CSA, ratio),
        )

    def _fold(
        self,
        name: str,
        inputs: ref.RequestInputs,
        tokens: ref.TokenPlan,
        closing: ref.ClosingPlan,
        ratio: int,
        shape: BatchShape,
    ) -> FoldPlan:
        geometry, put = self._geometry, self._buffers.put
        steps = shape.fold_steps(ratio, geometry.in_place_tokens)
        segments = ref.fold_segments(inputs, closing, ratio, steps, geometry)
        rows = geometry.fold_row(tokens.slot_T.clamp(min=0), tokens.positions_T)
        return FoldPlan(
            ratio=ratio,
            ape_row_T=put(f"{name}.ape_row", tokens.positions_T % ratio),
            state_loc_T=self._state_loc(name, tokens, rows, geometry.in_place_tokens),
            source_SJ=put(f"{name}.source", segments.source_SJ),
            position_SJ=put(f"{name}.position", segments.position_SJ),
            start_S=put(f"{name}.start", segments.start_S),
            accumulator_row_S=put(f"{name}.accumulator_row", segments.accumulator_row_S),
            accumulator_loc_B=put(f"{name}.accumulator_loc", segments.accumulator_loc_B),
            folded_B=put(f"{name}.folded", segments.folded_B),
            entry_rope=self._entry_rope(name, closing, LayerKind.HCA, ratio),
        )

    def _entry_rope(
        self, name: str, closing: ref.ClosingPlan, kind: LayerKind, ratio: int
    ) -> RopeTable:
        frequencies = self._base_of_ratio[kind, ratio]
        return self._rope(name, ratio * closing.entry_E, frequencies, prefix="entry_")
