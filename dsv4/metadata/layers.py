"""Assembles each layer's narrow tensors from the shared ones and the pool's views: no arithmetic, only picking."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dsv4.config import LayerConfig, LayerKind
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import (
    CompressorTarget,
    LayerTensors,
    ScoreInputs,
    SelectOutput,
    Source,
    Workspace,
)
from dsv4.pool.base import KVPool, Region
from dsv4.pool.geometry import PagedRows


def layer_tensors(
    pool: KVPool, shared: SharedTensors, workspace: Workspace, request_slots_B: Tensor
) -> tuple[LayerTensors, ...]:
    """One LayerTensors per row of the model's layer table, drafts included."""
    derived: dict[int, dict[object, Tensor]] = {ratio: {} for ratio in shared.num_visible}
    return tuple(
        _one_layer(pool, index, layer, shared, workspace, request_slots_B, derived)
        for index, layer in enumerate(pool.model.layers)
    )


def _one_layer(
    pool: KVPool,
    index: int,
    layer: LayerConfig,
    shared: SharedTensors,
    workspace: Workspace,
    request_slots_B: Tensor,
    derived: Mapping[int, dict[object, Tensor]],
) -> LayerTensors:
    window = Source(
        pool.view(index, Region.WINDOW), shared.window_stream, fresh_TD=workspace.fresh_TD
    )
    sources: tuple[Source, ...] = (window,)
    plan = main = keys = score = output = None
    if layer.kind is not LayerKind.SLIDING:
        stream = shared.entry_streams[layer.ratio, layer.index_topk]
        entries = pool.view(layer.entry_source, Region.ENTRIES)
        sources = (window, Source(entries, stream))
        plan = shared.state_plans[layer.kind.value, layer.ratio]
        main = _main_target(pool, index, layer, shared)
    if layer.kind is LayerKind.CSA:
        keys = CompressorTarget(
            state_view=pool.view(index, Region.INDEX_STATE),
            entry_view=pool.view(index, Region.INDEX),
            entry_loc_E=shared.index_locs[layer.ratio],
        )
        made = derived[layer.ratio]
        score = _score_inputs(pool, layer, shared, workspace, request_slots_B, made)
        output = SelectOutput(
            stream=sources[1].stream,
            lane_TK=shared.select_lanes[layer.ratio, layer.index_topk],
            rows=_paged(pool, layer.ratio, pool.geometry.entry_base),
            topk=layer.index_topk,
        )
    return LayerTensors(
        positions_T=shared.positions_T,
        slot_T=shared.slot_T,
        store_loc_T=shared.store_loc_T,
        tail_loc_T=shared.tail_loc_T,
        window_view=window.view,
        rope=shared.ropes[layer.rope_theta, layer.yarn],
        sources=sources,
        workspace=workspace,
        state_plan=plan,
        main=main,
        index=keys,
        score_inputs=score,
        select_output=output,
    )


def _paged(pool: KVPool, ratio: int, base: int) -> PagedRows:
    rows_per_page = pool.geometry.rows_per_page(ratio)
    return PagedRows(block_table=pool.block_table, rows_per_page=rows_per_page, base=base)


def _main_target(
    pool: KVPool, index: int, layer: LayerConfig, shared: SharedTensors
) -> CompressorTarget:
    folds = layer.kind is LayerKind.HCA
    return CompressorTarget(
        state_view=pool.view(index, Region.STATE),
        entry_view=pool.view(index, Region.ENTRIES),
        entry_loc_E=shared.entry_locs[layer.ratio],
        accumulator_view=pool.view(index, Region.ACCUMULATOR) if folds else None,
    )


def _score_inputs(
    pool: KVPool,
    layer: LayerConfig,
    shared: SharedTensors,
    workspace: Workspace,
    request_slots_B: Tensor,
    derived: dict[object, Tensor],
) -> ScoreInputs:
    width = shared.shape.max_entries(layer.ratio)
    return ScoreInputs(
        view=pool.view(layer.index_source, Region.INDEX),
        keys=_paged(pool, layer.ratio, 0),
        slot_T=shared.slot_T,
        num_visible_T=shared.num_visible[layer.ratio],
        max_entries=width,
        query_lengths=shared.shape.query_lengths,
        request_slots_B=request_slots_B,
        tile_tokens=max(1, workspace.scores.shape[0] // max(width, 1)),
        derived=derived,
    )
