"""The builder for pools whose layers are row tables: all sizing and addressing through the pool's one geometry.

Both pool families present the same two segments per token, window rows and entries; they differ in the geometry's
`entry_base` and in which table a view names, so one builder serves both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from dsv4.config import BackendConfig, ModelConfig
from dsv4.errors import BatchError, SlotError
from dsv4.log import get_logger
from dsv4.metadata import fill_ref as ref
from dsv4.metadata.base import FillKernel, MetadataBuilder
from dsv4.metadata.batch import BatchShape, ForwardBatch
from dsv4.metadata.buffers import Buffers, BufferSpec, buffer_specs, workspace_specs
from dsv4.metadata.fill import TorchFill
from dsv4.metadata.forward import Epoch, ForwardMetadata
from dsv4.metadata.layers import layer_tensors
from dsv4.metadata.plans import Workspace
from dsv4.pool.base import KVPool
from dsv4.pool.formats import row_format
from dsv4.pool.geometry import PoolGeometry

_log = get_logger(__name__)

LENGTH_STEP = 256
"""Granule of BatchShape.max_length outside graph capture."""


@frozen(eq=False)
class _Filled:
    """What the current metadata was computed from."""

    batch: ForwardBatch
    lengths: tuple[int, ...] | None
    """Committed tokens of each request, None where only the device knows them."""
    pool_version: int


def capacity_of(config: BackendConfig) -> BatchShape:
    """The largest batch shape a backend may see."""
    requests = config.max_batch_requests or config.pool.max_requests
    tokens = max(config.max_batch_tokens, requests)
    return BatchShape(
        num_tokens=tokens,
        num_requests=requests,
        max_query_tokens=tokens,
        max_length=config.pool.max_context,
    )


def _workspace(
    model: ModelConfig, capacity: BatchShape, config: BackendConfig
) -> dict[str, BufferSpec]:
    values = row_format(config.pool.row_format, model).value_dtype
    return workspace_specs(model, capacity, config.score_budget_bytes, values)


class TableMetadataBuilder(MetadataBuilder):
    """Keeps the MetadataBuilder promises for any KVPool with a PoolGeometry."""

    def __init__(
        self, pool: KVPool, config: BackendConfig, fill: type[FillKernel] | None = None
    ) -> None:
        model, geometry = pool.model, pool.geometry
        self._pool, self._model, self._geometry = pool, model, geometry
        self.capacity = capacity_of(config)
        self._buffers = Buffers(buffer_specs(model, geometry, self.capacity), pool.device)
        scratch = _workspace(model, self.capacity, config)
        self._scratch = Buffers(scratch, pool.device)
        self._fill = (fill or TorchFill)(model, geometry, pool, self._buffers)
        self.metadata = ForwardMetadata()
        self.computed = self._buffers.computed
        self._batch: ForwardBatch | None = None
        self._begun_at = -1
        self._filled: _Filled | None = None

    @classmethod
    def estimate(
        cls, model: ModelConfig, geometry: PoolGeometry, config: BackendConfig
    ) -> dict[str, int]:
        capacity = capacity_of(config)
        specs: dict[str, BufferSpec] = {
            f"metadata.{k}": v for k, v in buffer_specs(model, geometry, capacity).items()
        }
        scratch = _workspace(model, capacity, config)
        specs |= {f"workspace.{k}": v for k, v in scratch.items()}
        return {name: spec.nbytes for name, spec in specs.items()}

    def nbytes(self) -> Mapping[str, int]:
        named = [("metadata", self._buffers), ("workspace", self._scratch)]
        return {
            f"{group}.{name}": t.numel() * t.element_size()
            for group, buffers in named
            for name, t in buffers.tensors.items()
        }

    def prepare(self, batch: ForwardBatch) -> None:
        self._check(batch)
        self._pool.begin_forward(batch.slots, batch.query_lengths)
        self._batch, self._begun_at = batch, self._pool.version
        starts = [0]
        for n in batch.query_lengths:
            starts.append(starts[-1] + n)
        padding = [0] * (batch.num_tokens - len(batch.token_ids))
        self._put_ints("slots", [*batch.slots, -1])
        self._put_ints("starts", starts)
        self._put_ints("query_lengths", [*batch.query_lengths, 0])
        self._put_ints("token_ids", [*batch.token_ids, *padding])

    def _rounded(self, length: int) -> int:
        """Up to LENGTH_STEP more, so that neighbouring steps share their shapes."""
        return min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.capacity.max_length)

    def _put_ints(self, name: str, values: list[int]) -> None:
        buffer = self._buffers.tensors[name]
        buffer[: len(values)].copy_(torch.tensor(values, dtype=buffer.dtype))

    def _check(self, batch: ForwardBatch) -> None:
        limits = (
            ("tokens", batch.num_tokens, self.capacity.num_tokens, "max_batch_tokens"),
            ("requests", len(batch.slots), self.capacity.num_requests, "max_batch_requests"),
        )
        for what, got, limit, knob in limits:
            if got > limit:
                raise BatchError(f"batch of {got} {what}: the backend holds {limit}; raise {knob}")
        top = max(batch.token_ids, default=0)
        if top >= self._model.vocab_size or min(batch.token_ids, default=0) < 0:
            raise BatchError(
                f"token_ids reach {min(batch.token_ids)}..{top}: ids must lie in [0, {self._model.vocab_size})"
            )

    def _shape_of(self, batch: ForwardBatch) -> BatchShape:
        """The shape of a forward of `batch` from here: exact where the host knows the lengths, else an upper bound."""
        lengths = [self._pool.length(s) if s >= 0 else 0 for s in batch.slots]
        lead = [self._pool.lead(s) if s >= 0 else 0 for s in batch.slots]
        ends = map(sum, zip(lengths, lead, batch.query_lengths, strict=True))
        return BatchShape(
            num_tokens=batch.num_tokens,
            num_requests=len(batch.slots),
            max_query_tokens=max(batch.query_lengths, default=0),
            max_length=self._rounded(max(ends, default=0)),
            query_lengths=batch.query_lengths,
            lengths=None if any(lead) else tuple(lengths),
        )

    def fill(self) -> Epoch:
        if self._batch is None:
            raise BatchError("fill: no batch; call prepare(batch) first")
        if self._begun_at != self._pool.version:
            # lengths moved since prepare: this is another forward of the same batch
            self._pool.begin_forward(self._batch.slots, self._batch.query_lengths)
            self._begun_at = self._pool.version
        shape = self._shape_of(self._batch)
        shared = self._fill.fill(shape)
        scratch, tokens = self._scratch.tensors, shape.num_tokens
        chunks = shape.max_query_tokens > self._geometry.in_place_tokens
        workspace = Workspace(
            fresh_TD=scratch["fresh"].view(-1, self._model.head_dim)[:tokens] if chunks else None,
            scores=scratch["scores"],
            pooled=scratch["pooled"],
            select=scratch["select"],
            partials=scratch["partials"],
        )
        layers = layer_tensors(self._pool, shared, workspace)
        self._filled = _Filled(self._batch, shape.lengths, self._pool.version)
        return self.metadata.publish(shared, layers)

    def advance(self, accepted_B: Tensor) -> None:
        if self._batch is None:
            raise BatchError("advance: no batch; call prepare(batch) first")
        slots_B = self._buffers.view("slots", len(self._batch.slots))
        spans = zip(self._batch.slots, self._batch.query_lengths, strict=True)
        self._pool.advance(slots_B, accepted_B, {s: n for s, n in spans if s >= 0})

    def swa_loc_for(self, batch: ForwardBatch | None) -> Tensor:
        reason = self._why_stale(batch)
        if reason is None:
            return self.metadata.swa_loc_T
        _log.info("swa_loc_recomputed", reason=reason)
        if batch is None:
            return torch.empty(0, dtype=torch.int32, device=self._pool.device)
        return self._recompute(batch)

    def _why_stale(self, batch: ForwardBatch | None) -> str | None:
        filled = self._filled
        if batch is None or batch.num_tokens == 0 or not any(batch.query_lengths):
            return "idle"
        if filled is None or filled.batch.slots != batch.slots:
            return "re-padded" if filled and self._repadded(filled.batch, batch) else "other slots"
        if filled.batch.num_tokens != batch.num_tokens:
            return "re-padded"
        known = filled.lengths is not None and filled.lengths == self._shape_of(batch).lengths
        unmoved = known or filled.pool_version == self._pool.version
        same = unmoved and filled.batch.query_lengths == batch.query_lengths
        return None if same else "other positions"

    @staticmethod
    def _repadded(a: ForwardBatch, b: ForwardBatch) -> bool:
        return [s for s in a.slots if s >= 0] == [s for s in b.slots if s >= 0]

    def _recompute(self, batch: ForwardBatch) -> Tensor:
        device, limit = self._pool.device, self._geometry.max_requests
        if max(batch.slots, default=-1) >= limit:
            raise SlotError(
                f"slot {max(batch.slots)}: the pool has slots 0..{limit - 1}; acquire one"
            )

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        starts = [0]
        for n in batch.query_lengths:
            starts.append(starts[-1] + n)
        inputs = ref.live_requests(
            ints([*batch.slots, -1]),
            ints(starts),
            ints([*batch.query_lengths, 0]),
            self._pool.lengths,
        )
        shape = BatchShape(
            num_tokens=batch.num_tokens, num_requests=len(batch.slots), max_query_tokens=0, max_length=0
        )  # fmt: skip
        tokens = ref.plan_tokens(inputs, shape, self._geometry.in_place_tokens)
        return ref.swa_loc(tokens, self._geometry)
