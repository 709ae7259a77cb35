"""A golden model on one pool: forwards on slots of its own, and what a forward did on the inside.

Legend: T tokens, V vocabulary, K picks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import attrs
import torch
from attrs import field, frozen
from torch import Tensor, nn

from dsv4 import registry
from dsv4.backend import Backend, torch_device
from dsv4.config import BackendConfig, LayerKind, ModelConfig
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.forward import Epoch
from dsv4.metadata.plans import StreamKey
from dsv4.model.block import Block
from dsv4.model.checkpoint import load_tensors
from dsv4.model.decoder import Decoder
from dsv4.model.model import dtype_of
from dsv4.pool.base import Region

SLOTS = 3
"""One to work in, and one on either side: a slot of 0 would hide address errors."""


@frozen(kw_only=True)
class VerifyOptions:
    """How a golden folder is run."""

    pools: tuple[str, ...] = ("unified", "three-pool")
    """Registered pool families."""
    kernels: str = "auto"
    row_format: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    chunkings: int = 10
    """Random ways to cut each prompt into chunks."""
    seed: int = 0
    """Of the chunkings."""
    deterministic: bool = False
    longest: int | None = None
    """Prompts of more tokens are left out."""

    @property
    def by_layer(self) -> bool:
        """bf16 activations: layers one by one, instead of everything to fp32 limits."""
        return self.dtype == "bfloat16"


@frozen(eq=False)
class Trace:
    """What a forward did on the inside: `name.layer` -> value. Collected by `Session.traced`."""

    values: dict[str, Tensor] = field(factory=dict)

    def __call__(self, name: str, layer: int, value: Tensor) -> None:
        self.values[f"{name}.{layer}"] = value.clone()


class Session:
    """One decoder on one backend. Lengths are committed by every forward."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        pool: str,
        options: VerifyOptions,
        max_context: int,
    ) -> None:
        device = torch_device(options.device)
        dtype = dtype_of(options.dtype, model, device)
        self.model = attrs.evolve(model, torch_dtype=str(dtype).removeprefix("torch."))
        self.decoder = Decoder(self.model, dtype)
        load_tensors(self.decoder, weights)
        self.decoder.to(device)
        config = registry.pool_config_class(pool)(
            max_requests=SLOTS, max_context=max_context, row_format=options.row_format
        )
        self.backend = Backend.from_config(
            self.model,
            BackendConfig(
                pool=config,
                kernels=options.kernels,
                deterministic=options.deterministic,
                max_batch_tokens=max_context,
                max_batch_requests=1,
            ),
            device,
        )

    @contextmanager
    def slot(self, num_tokens: int) -> Iterator[int]:
        """A fresh slot in the middle of the pool."""
        pool = self.backend.pool
        below, slot = pool.acquire(), pool.acquire()
        try:
            pool.reserve(below, 1)
            pool.reserve(slot, num_tokens)
            yield slot
        finally:
            pool.release(slot)
            pool.release(below)

    def forward(self, slot: int, token_ids: Sequence[int], trace: Trace | None = None) -> Tensor:
        """fp32 logits [T, V] of the tokens behind what the slot holds."""
        streams_TND, _ = self.streams(slot, token_ids, trace)
        self.backend.pool.commit(slot, len(token_ids))
        return self.decoder.logits(streams_TND, self.backend.kernels, trace)

    def streams(
        self, slot: int, token_ids: Sequence[int], trace: Trace | None = None
    ) -> tuple[Tensor, Epoch]:
        """Final residual streams [T, N, D] and the epoch they were computed in; commits nothing."""
        builder = self.backend.builder
        builder.prepare(ForwardBatch.of([(slot, token_ids)]))
        epoch = builder.fill()
        probe = None if trace is None else _SelectionProbe(self, slot, trace)
        return self.decoder(builder.metadata, epoch, self.backend.kernels, probe), epoch

    def chunks(self, token_ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Logits [T, V] of a prompt processed in chunks of these sizes, in a fresh slot."""
        with self.slot(len(token_ids)) as slot:
            parts, start = [], 0
            for num_tokens in sizes:
                parts.append(self.forward(slot, token_ids[start : start + num_tokens]))
                start += num_tokens
        return torch.cat(parts)

    @contextmanager
    def traced(self) -> Iterator[Trace]:
        """A trace that also sees what the routers return."""
        trace = Trace()
        handles = []
        for layer, block in enumerate(self.decoder.layers):
            assert isinstance(block, Block)

            def note(
                module: nn.Module, inputs: object, routes: tuple[Tensor, Tensor], layer: int = layer
            ) -> None:
                for name, value in zip(("route_indices", "route_weights"), routes, strict=True):
                    trace(name, layer, value)

            handles.append(block.ffn.gate.register_forward_hook(note))
        try:
            yield trace
        finally:
            for handle in handles:
                handle.remove()

    def entries(self, slot: int, layer: int, num_entries: int) -> Tensor:
        """The first entries of a slot as attention reads them, fp32 [num_entries, head_dim]."""
        view = self.backend.pool.view(layer, Region.ENTRIES)
        return view.read(self._entry_rows(slot, layer, num_entries))

    def selection(self, slot: int, layer: int) -> Tensor:
        """Entries that the latest select of a CSA layer chose: int64 [T, K], descending.

        -1 = none, -2 = a row that no entry of the slot lies in.
        """
        config = self.model.layers[layer]
        shared = self.backend.builder.metadata.shared
        stream = shared.entry_streams[StreamKey.of(config)]
        rows = self._entry_rows(slot, layer, shared.shape.max_entries(config.ratio))
        entry_of = {row: entry for entry, row in enumerate(rows.tolist())}
        bounds, indices = stream.indptr_T1.tolist(), stream.indices_N.tolist()
        picks = [
            sorted((entry_of.get(row, -2) for row in indices[start:end]), reverse=True)
            for start, end in pairwise(bounds)
        ]
        return torch.tensor([p + [-1] * (stream.max_rows - len(p)) for p in picks])

    def _entry_rows(self, slot: int, layer: int, num_entries: int) -> Tensor:
        pool = self.backend.pool
        rows = pool.geometry.paged_entries(self.model.layers[layer].ratio, pool.block_table)
        entry_N = torch.arange(num_entries, device=pool.device)
        return rows.rows(torch.full_like(entry_N, slot), entry_N)


@frozen(eq=False)
class _SelectionProbe:
    """Reads a CSA layer's selection before the next layer of the same stream overwrites it."""

    session: Session
    slot: int
    trace: Trace

    def __call__(self, name: str, layer: int, value: Tensor) -> None:
        self.trace(name, layer, value)
        layers = self.session.model.layers
        if name == "attn_out" and layers[layer].kind is LayerKind.CSA:
            self.trace("index_topk", layer, self.session.selection(self.slot, layer))
