"""Which `StatePart` handles which component of a table pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.pool.base import Component, Region
from dsv4.pool.geometry import PoolGeometry
from dsv4.pool.state import (
    Bookkeeping,
    FoldedWindow,
    LastToken,
    OverlapRing,
    PageEntries,
    StatePart,
    WindowRing,
)


def build_parts(
    components: Mapping[str, Component], geometry: PoolGeometry, model: ModelConfig
) -> list[StatePart]:
    """One part per component (the two of an HCA compressor share one), in layer order."""
    parts: list[StatePart] = []
    for index, layer in enumerate(model.layers):
        parts += _layer_parts(index, layer, components, geometry)
    if "last_streams" in components:
        parts.append(LastToken(components["last_streams"], geometry))
    parts.append(Bookkeeping(components["lengths"], components["block_table"]))
    return parts


def _layer_parts(
    index: int, layer: LayerConfig, components: Mapping[str, Component], geometry: PoolGeometry
) -> Iterator[StatePart]:
    def component(region: Region) -> Component:
        return components[f"layer{index}.{region.value}"]

    yield WindowRing(component(Region.WINDOW), geometry)
    if layer.ratio:
        yield PageEntries(component(Region.ENTRIES), geometry, layer.ratio)
    if layer.kind is LayerKind.CSA:
        yield PageEntries(component(Region.INDEX), geometry, layer.ratio)
        for region in (Region.STATE, Region.INDEX_STATE):
            yield OverlapRing(component(region), geometry, layer.ratio)
    elif layer.kind is LayerKind.HCA:
        accumulator, raw = component(Region.ACCUMULATOR), component(Region.STATE)
        yield FoldedWindow(accumulator, raw, geometry, layer.ratio)
