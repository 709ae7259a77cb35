"""A forward's shared tensors as views of the buffers of their names: what every fill kernel returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, plan_keys, rope_names, stream_keys
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import (
    FoldPlan,
    IndexStream,
    OverlapPlan,
    PlanKey,
    RopeTable,
    StreamKey,
)
from dsv4.pool.geometry import PoolGeometry


def stream_width(key: StreamKey, shape: BatchShape) -> int:
    """Most entries of a token in a stream."""
    visible = shape.max_entries(key.ratio)
    return min(key.topk, visible) if key.topk else visible


class SharedViews:
    """Picks names and shapes; nothing is computed. New objects each time, for kernels keep what
    they derive from a stream or table with it, but the same tensors."""

    def __init__(self, model: ModelConfig, geometry: PoolGeometry, buffers: Buffers) -> None:
        self._model, self._geometry, self._buffers = model, geometry, buffers
        self._stream_keys, self._plan_keys = stream_keys(model), plan_keys(model)
        self._rope_names = rope_names(model)

    def of(self, shape: BatchShape, closing: Mapping[int, int]) -> SharedTensors:
        """`closing`: by ratio, the windows that may close."""
        chunks = shape.max_query_tokens > self._geometry.in_place_tokens
        view, tokens, requests = self._buffers.view, shape.num_tokens, shape.num_requests
        return SharedTensors(
            shape=shape,
            slots_B=view("slots", requests),
            token_ids_T=view("token_ids", tokens),
            request_T=view("request", tokens),
            slot_T=view("slot", tokens),
            positions_T=view("positions", tokens),
            swa_loc_T=view("swa_loc", tokens),
            store_loc_T=view("store_loc", tokens),
            tail_loc_T=view("tail_loc", tokens) if chunks else None,
            window_stream=self._window(shape),
            entry_streams={key: self._stream(key, shape) for key in self._stream_keys},
            select_lanes={
                key: view(f"{key.name}.lanes", tokens, stream_width(key, shape))
                for key in self._stream_keys
                if key.topk
            },
            num_visible={x.ratio: view(f"{x.name}.visible", tokens) for x in self._plan_keys},
            state_plans={x: self._plan(x, shape, closing[x.ratio]) for x in self._plan_keys},
            entry_locs=self._locs("entry_loc", self._plan_keys, closing),
            index_locs=self._locs(
                "index_loc", [x for x in self._plan_keys if x.kind is LayerKind.CSA], closing
            ),
            ropes={key: self._rope(name, tokens) for key, name in self._rope_names.items()},
            last_row_B=view("last_row", requests),
        )

    def _window(self, shape: BatchShape) -> IndexStream:
        view, tokens = self._buffers.view, shape.num_tokens
        rows = min(self._geometry.window, shape.max_length)
        return IndexStream(
            view("window.indptr", tokens + 1), view("window.indices", tokens * rows), rows
        )

    def _stream(self, key: StreamKey, shape: BatchShape) -> IndexStream:
        view, tokens, rows = self._buffers.view, shape.num_tokens, stream_width(key, shape)
        indptr = view(f"{key.name}.indptr", tokens + 1)
        indices = view(f"{key.name}.indices", tokens * rows)
        return IndexStream(indptr, indices, rows, final=key.topk == 0)

    def _locs(
        self, part: str, plans: Iterable[PlanKey], closing: Mapping[int, int]
    ) -> dict[int, Tensor]:
        view = self._buffers.view
        return {x.ratio: view(f"{x.name}.{part}", closing[x.ratio]) for x in plans}

    def _rope(self, name: str, rows: int, prefix: str = "") -> RopeTable:
        view, half = self._buffers.view, self._model.qk_rope_head_dim // 2
        cos, sin = (view(f"{name}.{prefix}{part}", rows, half) for part in ("cos", "sin"))
        return RopeTable(cos, sin)

    def _plan(self, key: PlanKey, shape: BatchShape, closing: int) -> OverlapPlan | FoldPlan:
        name, ratio, in_place_tokens = key.name, key.ratio, self._geometry.in_place_tokens
        view, tokens, requests = self._buffers.view, shape.num_tokens, shape.num_requests
        in_place = shape.max_query_tokens <= in_place_tokens
        ape_row_T, state_loc_T = view(f"{name}.ape_row", tokens), view(f"{name}.state_loc", tokens)
        entry_rope = self._rope(name, closing, prefix="entry_")
        if key.kind is LayerKind.CSA:
            return OverlapPlan(
                ratio=ratio,
                in_place=in_place,
                ape_row_T=ape_row_T,
                state_loc_T=state_loc_T,
                source_EM=view(f"{name}.source", closing, 2 * ratio),
                entry_rope=entry_rope,
            )
        segments, steps = closing + requests, shape.fold_steps(ratio, in_place_tokens)
        return FoldPlan(
            ratio=ratio,
            in_place=in_place,
            starts_B1=view("starts", requests + 1),
            closing_indptr_B1=view(f"{name}.closing_indptr", requests + 1),
            ape_row_T=ape_row_T,
            state_loc_T=state_loc_T,
            source_SJ=view(f"{name}.source", segments, steps),
            position_SJ=view(f"{name}.position", segments, steps),
            start_S=view(f"{name}.start", segments),
            accumulator_row_S=view(f"{name}.accumulator_row", segments),
            accumulator_loc_B=view(f"{name}.accumulator_loc", requests),
            folded_B=view(f"{name}.folded", requests),
            entry_rope=entry_rope,
        )
