"""One fill: runs the address functions of `fill_ref` once each and puts their results into fixed buffers.

Legend as there: T tokens, B requests, E closing windows, S fold segments, J fold steps, M pooled tokens, K picks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata import fill_ref as ref
from dsv4.metadata.base import FillKernel
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, plan_keys, rope_names, stream_keys
from dsv4.metadata.fill_views import SharedViews, stream_width
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import PlanKey, RopeKey, StreamKey
from dsv4.metadata.rope import inverse_frequencies, rope_table
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PoolGeometry


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
        self._views = SharedViews(model, geometry, buffers)

    def fill(self, shape: BatchShape) -> SharedTensors:
        buffers = self._buffers
        buffers.computed.clear()
        inputs = ref.live_requests(
            buffers.view("slots", shape.num_requests + 1),
            buffers.view("starts", shape.num_requests + 1),
            buffers.view("query_lengths", shape.num_requests + 1),
            self._pool.lengths,
        )
        tokens = ref.plan_tokens(inputs, shape, self._geometry.in_place_tokens)
        self._tokens(tokens, shape)
        buffers.put("last_row", ref.last_rows(inputs))
        closing = {key: shape.max_closing(key.ratio) for key in plan_keys(self._model)}
        visible = {}
        for key, most in closing.items():
            windows = ref.closing_windows(inputs, key.ratio, most)
            visible[key.ratio] = self._plan(key, inputs, tokens, windows, shape)
        for stream in stream_keys(self._model):
            self._entries(stream, tokens, visible[stream.ratio], shape)
        return self._views.of(shape, {key.ratio: most for key, most in closing.items()})

    def _tokens(self, tokens: ref.TokenPlan, shape: BatchShape) -> None:
        put, geometry = self._buffers.put, self._geometry
        swa_loc_T = put("swa_loc", ref.swa_loc(tokens, geometry))
        put("store_loc", torch.where(tokens.fresh_T, -1, swa_loc_T))
        if shape.max_query_tokens > geometry.in_place_tokens:
            put("tail_loc", torch.where(tokens.fresh_T, swa_loc_T, -1))
        put("request", tokens.request_T)
        put("slot", tokens.slot_T)
        put("positions", tokens.positions_T)
        indptr, indices = ref.window_stream(
            tokens, geometry, min(geometry.window, shape.max_length)
        )
        put("window.indptr", indptr)
        put("window.indices", indices)
        for key, name in self._rope_names.items():
            self._rope(f"{name}.", tokens.positions_T, self._frequencies[key])

    def _rope(self, prefix: str, positions: Tensor, frequencies: Tensor) -> None:
        table = rope_table(positions, frequencies)
        self._buffers.put(f"{prefix}cos", table.cos_TP)
        self._buffers.put(f"{prefix}sin", table.sin_TP)

    def _entries(
        self, key: StreamKey, tokens: ref.TokenPlan, visible_T: Tensor, shape: BatchShape
    ) -> None:
        put, name, width = self._buffers.put, key.name, stream_width(key, shape)
        if key.topk:  # select writes the indices, layer by layer
            indptr, lane_TK = ref.selected_lanes(visible_T, width)
            put(f"{name}.lanes", lane_TK)
        else:
            rows = self._geometry.paged_entries(key.ratio, self._pool.block_table)
            indptr, indices = ref.entry_stream(tokens, visible_T, rows, width)
            put(f"{name}.indices", indices)
        put(f"{name}.indptr", indptr)

    def _plan(
        self,
        key: PlanKey,
        inputs: ref.RequestInputs,
        tokens: ref.TokenPlan,
        closing: ref.ClosingPlan,
        shape: BatchShape,
    ) -> Tensor:
        """The plan's buffers; returns n_vis of the tokens."""
        put, geometry, name, ratio = self._buffers.put, self._geometry, key.name, key.ratio
        visible_T = put(f"{name}.visible", ref.visible_entries(tokens, ratio))
        put(f"{name}.ape_row", tokens.positions_T % ratio)
        entries = geometry.paged_entries(ratio, self._pool.block_table)
        put(f"{name}.entry_loc", ref.entry_loc(inputs, closing, entries))
        self._rope(f"{name}.entry_", ratio * closing.entry_E, self._base_of_plan[key])
        slot_T = tokens.slot_T.clamp(min=0)
        if key.kind is LayerKind.CSA:
            keys = geometry.paged_keys(ratio, self._pool.block_table)
            put(f"{name}.index_loc", ref.entry_loc(inputs, closing, keys))
            put(f"{name}.source", ref.overlap_source(inputs, closing, ratio, geometry))
            rows = geometry.overlap_row(ratio, slot_T, tokens.positions_T)
            ring_rows = geometry.overlap_rows(ratio)
        else:
            self._fold(key, inputs, closing, shape)
            rows = geometry.fold_row(slot_T, tokens.positions_T)
            ring_rows = geometry.in_place_tokens
        put(f"{name}.state_loc", ref.ring_loc(rows, tokens, ring_rows))
        return visible_T

    def _fold(
        self,
        key: PlanKey,
        inputs: ref.RequestInputs,
        closing: ref.ClosingPlan,
        shape: BatchShape,
    ) -> None:
        put, geometry, name = self._buffers.put, self._geometry, key.name
        steps = shape.fold_steps(key.ratio, geometry.in_place_tokens)
        segments = ref.fold_segments(inputs, closing, key.ratio, steps, geometry)
        put(f"{name}.closing_indptr", ref.closing_indptr(inputs, key.ratio))
        put(f"{name}.source", segments.source_SJ)
        put(f"{name}.position", segments.position_SJ)
        put(f"{name}.start", segments.start_S)
        put(f"{name}.accumulator_row", segments.accumulator_row_S)
        put(f"{name}.accumulator_loc", segments.accumulator_loc_B)
        put(f"{name}.folded", segments.folded_B)
