"""Fixed buffers of a builder: sized once from capacities, filled through flat prefixes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from dsv4.config import LayerKind, ModelConfig
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.plans import PlanKey, RopeKey, StreamKey
from dsv4.pool.geometry import PoolGeometry

MAX_VIEWS = 4096
"""Remembered views of a builder; a batch shape needs some 60."""


@frozen
class BufferSpec:
    numel: int
    dtype: torch.dtype = torch.int32

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def stream_keys(model: ModelConfig) -> tuple[StreamKey, ...]:
    """Every distinct entry stream."""
    return tuple(dict.fromkeys(StreamKey.of(x) for x in model.layers if x.ratio))


def plan_keys(model: ModelConfig) -> tuple[PlanKey, ...]:
    """Every distinct compressor plan."""
    return tuple(dict.fromkeys(PlanKey.of(x) for x in model.layers if x.ratio))


def buffer_specs(
    model: ModelConfig, geometry: PoolGeometry, capacity: BatchShape
) -> dict[str, BufferSpec]:
    """Name -> size of every metadata buffer, at the largest batch shape."""
    tokens, requests, half = capacity.num_tokens, capacity.num_requests, model.qk_rope_head_dim // 2
    specs = {name: BufferSpec(requests + 1) for name in ("slots", "starts", "query_lengths")}
    specs["token_ids"] = BufferSpec(tokens, torch.int64)
    for name in ("request", "slot", "positions", "swa_loc", "store_loc", "tail_loc"):
        specs[name] = BufferSpec(tokens)
    specs["last_row"] = BufferSpec(requests)
    specs["window.indptr"] = BufferSpec(tokens + 1)
    specs["window.indices"] = BufferSpec(tokens * min(geometry.window, capacity.max_length))
    for name in rope_names(model).values():
        specs[f"{name}.cos"] = specs[f"{name}.sin"] = BufferSpec(tokens * half, torch.float32)
    for stream in stream_keys(model):
        rows = capacity.max_entries(stream.ratio)
        width = min(stream.topk, rows) if stream.topk else rows
        specs[f"{stream.name}.indptr"] = BufferSpec(tokens + 1)
        specs[f"{stream.name}.indices"] = BufferSpec(tokens * width)
        if stream.topk:
            specs[f"{stream.name}.lanes"] = BufferSpec(tokens * width)
    for plan in plan_keys(model):
        specs |= _plan_specs(plan, geometry, capacity, half)
    return specs


def _plan_specs(
    plan: PlanKey, geometry: PoolGeometry, capacity: BatchShape, half: int
) -> dict[str, BufferSpec]:
    name, ratio = plan.name, plan.ratio
    tokens, requests, closing = (
        capacity.num_tokens, capacity.num_requests, capacity.max_closing(ratio)
    )  # fmt: skip
    sizes = {"visible": tokens, "ape_row": tokens, "state_loc": tokens, "entry_loc": closing}
    if plan.kind is LayerKind.CSA:
        sizes |= {"index_loc": closing, "source": closing * 2 * ratio}
    else:
        segments = closing + requests
        lanes = segments * capacity.fold_steps(ratio, geometry.in_place_tokens)
        sizes |= {"source": lanes, "position": lanes, "start": segments}
        sizes |= {"accumulator_row": segments, "accumulator_loc": requests, "folded": requests}
        sizes |= {"closing_indptr": requests + 1}
    specs = {f"{name}.{part}": BufferSpec(size) for part, size in sizes.items()}
    for part in ("cos", "sin"):
        specs[f"{name}.entry_{part}"] = BufferSpec(closing * half, torch.float32)
    return specs


def rope_names(model: ModelConfig) -> dict[RopeKey, str]:
    """Every distinct rope base, and the prefix of its buffers."""
    keys = dict.fromkeys(RopeKey.of(x) for x in model.layers)
    return {key: f"rope.{i}" for i, key in enumerate(keys)}


MAX_SPLITS = 64
"""Most parts that attend splits one token's rows into."""
SPLIT_PROGRAMS = 264
"""Most (token, 64 heads, part) triples that are worth splitting: twice the processors of the largest device."""
SELECT_CHUNK = 4096
"""Fewest scores that a split row of select leaves to one program."""


def partial_rows(model: ModelConfig, capacity: BatchShape) -> int:
    """Rows of head_dim + 2 floats that attend's partial results may take."""
    heads = model.num_attention_heads
    return min(capacity.num_tokens * heads * MAX_SPLITS, SPLIT_PROGRAMS * 64)


def select_scratch(num_scores: int, num_tokens: int, topk: int) -> int:
    """int32 lanes for the candidates (score key and entry) of split score rows."""
    return 2 * topk * (num_scores // SELECT_CHUNK + num_tokens)


def workspace_specs(
    model: ModelConfig, capacity: BatchShape, score_budget_bytes: int, value_dtype: torch.dtype
) -> dict[str, BufferSpec]:
    """Fresh rows in the row format's value dtype, score scratch of the byte budget (never less than one row, never more
    than all), and what kernels that split their rows keep in between."""
    csa = [x for x in model.layers if x.kind is LayerKind.CSA]
    row = max((capacity.max_entries(x.ratio) for x in csa), default=0)
    topk = max((x.index_topk for x in csa), default=0)
    scores = max(row, min(capacity.num_tokens * row, score_budget_bytes // 4))
    pooled = max((capacity.max_closing(x.ratio) for x in model.layers if x.ratio), default=0)
    split_tokens = min(capacity.num_tokens, SPLIT_PROGRAMS)
    return {
        "fresh": BufferSpec(capacity.num_tokens * model.head_dim, value_dtype),
        "scores": BufferSpec(scores, torch.float32),
        "pooled": BufferSpec(pooled * max(model.head_dim, model.index_head_dim), torch.float32),
        "select": BufferSpec(select_scratch(scores, split_tokens, topk), torch.int32),
        "partials": BufferSpec(partial_rows(model, capacity) * (model.head_dim + 2), torch.float32),
    }


class Buffers:
    """Named flat tensors, allocated uninitialised once; `put` fills a prefix and counts."""

    def __init__(self, specs: Mapping[str, BufferSpec], device: torch.device) -> None:
        self.tensors = {
            name: torch.empty(spec.numel, dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }
        self.computed: Counter[str] = Counter()
        self._views: dict[tuple[object, ...], Tensor] = {}

    def put(self, name: str, value: Tensor) -> Tensor:
        """Copy `value` into the buffer's prefix; returns the prefix in value's shape."""
        self.computed[name] += 1
        return self.view(name, *value.shape).copy_(value)

    def view(self, name: str, *shape: int) -> Tensor:
        """The buffer's prefix in `shape`; the same tensor object for the same shape."""
        key = (name, *shape)
        if key not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = self.tensors[name][: math.prod(shape)].view(shape)
        return self._views[key]
