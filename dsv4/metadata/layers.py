"""Assembles each layer's narrow tensors from the shared ones and the pool's views: no arithmetic, only picking."""

from __future__ import annotations

from torch import Tensor

from dsv4.config import LayerConfig, LayerKind
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import (
    CompressorTarget,
    LayerTensors,
    PlanKey,
    RopeKey,
    ScoreInputs,
    SelectOutput,
    Source,
    StreamKey,
    Workspace,
)
from dsv4.pool.base import KVPool, Region


def layer_tensors(
    pool: KVPool, shared: SharedTensors, workspace: Workspace
) -> tuple[LayerTensors, ...]:
    """One LayerTensors per row of the model's layer table, drafts included."""
    derived: dict[int, dict[object, Tensor]] = {ratio: {} for ratio in shared.num_visible}
    pooled = _pooled(pool, shared, workspace)
    return tuple(
        _one_layer(pool, index, layer, shared, workspace, pooled, derived.get(layer.ratio, {}))
        for index, layer in enumerate(pool.model.layers)
    )


def _pooled(
    pool: KVPool, shared: SharedTensors, workspace: Workspace
) -> dict[tuple[int, int], Tensor]:
    """By (ratio, width): scratch for the pooled entries of one compressor, the same for all layers."""
    model = pool.model
    parts = ((shared.entry_locs, model.head_dim), (shared.index_locs, model.index_head_dim))
    return {
        (ratio, width): workspace.pooled_rows(loc_E.shape[0], width)
        for locs, width in parts
        for ratio, loc_E in locs.items()
    }


def _one_layer(
    pool: KVPool,
    index: int,
    layer: LayerConfig,
    shared: SharedTensors,
    workspace: Workspace,
    pooled: dict[tuple[int, int], Tensor],
    derived: dict[object, Tensor],
) -> LayerTensors:
    csa = layer.kind is LayerKind.CSA
    sources = _sources(pool, index, layer, shared, workspace)
    return LayerTensors(
        positions_T=shared.positions_T,
        store_loc_T=shared.store_loc_T,
        tail_loc_T=shared.tail_loc_T,
        window_view=sources[0].view,
        rope=shared.ropes[RopeKey.of(layer)],
        sources=sources,
        workspace=workspace,
        state_plan=shared.state_plans[PlanKey.of(layer)] if layer.ratio else None,
        main=_main_target(pool, index, layer, shared, pooled) if layer.ratio else None,
        index=_index_target(pool, index, layer, shared, pooled) if csa else None,
        score_inputs=_score_inputs(pool, layer, shared, workspace, derived) if csa else None,
        select_output=_select_output(pool, layer, shared, workspace) if csa else None,
    )


def _sources(
    pool: KVPool, index: int, layer: LayerConfig, shared: SharedTensors, workspace: Workspace
) -> tuple[Source, ...]:
    view = pool.view(index, Region.WINDOW)
    window = Source(view, shared.window_stream, fresh_TD=workspace.fresh_TD)
    if layer.kind is LayerKind.SLIDING:
        return (window,)
    entries = pool.view(layer.entry_source, Region.ENTRIES)
    return (window, Source(entries, shared.entry_streams[StreamKey.of(layer)]))


def _main_target(
    pool: KVPool,
    index: int,
    layer: LayerConfig,
    shared: SharedTensors,
    pooled: dict[tuple[int, int], Tensor],
) -> CompressorTarget:
    folds = layer.kind is LayerKind.HCA
    return CompressorTarget(
        state_view=pool.view(index, Region.STATE),
        entry_view=pool.view(index, Region.ENTRIES),
        entry_loc_E=shared.entry_locs[layer.ratio],
        pooled_EC=pooled[layer.ratio, pool.model.head_dim],
        accumulator_view=pool.view(index, Region.ACCUMULATOR) if folds else None,
    )


def _index_target(
    pool: KVPool,
    index: int,
    layer: LayerConfig,
    shared: SharedTensors,
    pooled: dict[tuple[int, int], Tensor],
) -> CompressorTarget:
    return CompressorTarget(
        state_view=pool.view(index, Region.INDEX_STATE),
        entry_view=pool.view(index, Region.INDEX),
        entry_loc_E=shared.index_locs[layer.ratio],
        pooled_EC=pooled[layer.ratio, pool.model.index_head_dim],
    )


def _score_inputs(
    pool: KVPool,
    layer: LayerConfig,
    shared: SharedTensors,
    workspace: Workspace,
    derived: dict[object, Tensor],
) -> ScoreInputs:
    width = shared.shape.max_entries(layer.ratio)
    return ScoreInputs(
        view=pool.view(layer.index_source, Region.INDEX),
        keys=pool.geometry.paged_keys(layer.ratio, pool.block_table),
        slot_T=shared.slot_T,
        num_visible_T=shared.num_visible[layer.ratio],
        max_entries=width,
        query_lengths=shared.shape.query_lengths,
        request_slots_B=shared.slots_B,
        tile_tokens=max(1, workspace.scores.shape[0] // max(width, 1)),
        derived=derived,
    )


def _select_output(
    pool: KVPool, layer: LayerConfig, shared: SharedTensors, workspace: Workspace
) -> SelectOutput:
    key = StreamKey.of(layer)
    return SelectOutput(
        stream=shared.entry_streams[key],
        scratch=workspace.select,
        lane_TK=shared.select_lanes[key],
        rows=pool.geometry.paged_entries(layer.ratio, pool.block_table),
    )
