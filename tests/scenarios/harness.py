"""TINY models on poisoned, guarded memory, driven by hand: forwards of any mixture, commit, rollback.

Before a session starts, every pool, metadata and scratch buffer holds poison (NaN, 0x7F, 2^31 - 1), each pool table
lies between guard rows, and torch hands out poisoned output buffers. Metadata and scratch are poisoned again in front
of every forward, so that nothing of an earlier one can be read.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4 import registry
from dsv4.backend import Backend, build_kernels
from dsv4.config import BackendConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.forward import ForwardMetadata
from dsv4.model.block import Probe
from dsv4.model.decoder import Decoder
from dsv4.pool.base import Component, Region
from dsv4.pool.tables import TablePool
from tests import run_on
from tests.scenarios.reference import Reference, Run
from tests.scenarios.weights import tiny_decoder, weights_of

FAMILIES: tuple[type[PoolConfig], ...] = (UnifiedPoolConfig, ThreePoolConfig)
GUARD_ROWS = 3
MARGIN = 2e-5
"""Least distance of a truth's own choices (entries, experts) from a tie: twenty times the fp32 error of a score."""
TOLERANCE = 1e-5
"""Logits of about unit variance through three layers in fp32, sums in another order than REF's."""
Requests = Sequence[tuple[int, Sequence[int]]]


def poison(tensor: Tensor) -> None:
    fillers = {torch.uint8: 0x7F, torch.int32: 2**31 - 1, torch.int64: 2**62}
    tensor.fill_(fillers.get(tensor.dtype, torch.nan))


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers instead of whatever was there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@frozen(eq=False)
class Truth:
    """A token sequence and what REF says about it; a prefix of it has the same numbers."""

    ids: tuple[int, ...]
    run: Run

    @property
    def logits(self) -> Tensor:
        return self.run.logits

    def wrong(self, start: int, count: int) -> list[int]:
        """As many tokens as at `start`, each another one than the true one."""
        return [(token + 7) % 64 for token in (self.ids + self.ids)[start : start + count]]


@functools.cache
def truth(length: int, seed: int = 0, decoder: Decoder | None = None) -> Truth:
    """Random tokens of TINY (or another model), redrawn until no choice of REF's is close to a tie."""
    model = decoder or tiny_decoder()
    reference = Reference(model.config, weights_of(model))
    for attempt in range(50):
        rng = random.Random(1000 * seed + attempt)
        ids = tuple(rng.randrange(model.config.vocab_size) for _ in range(length))
        run = reference.run(ids)
        if min(run.index_margin, run.router_margin) > MARGIN:
            return Truth(ids, run)
    raise AssertionError(f"no clear sequence of {length} tokens in 50 draws")


def assert_same(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Finite, and within tolerance (absolute, and relative to the expected value)."""
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


class Session:
    """A backend of one pool family, and the model that runs on it."""

    def __init__(
        self,
        family: type[PoolConfig],
        decoder: Decoder | None = None,
        *,
        slots: int = 4,
        context: int = 256,
        depth: int = 1,
        page: int = 32,
        deterministic: bool = False,
        max_tokens: int = 512,
        score_budget_bytes: int = 2**20,
        row_stride: int = 1,
        **pool_options: Any,
    ) -> None:
        """`depth` is D. `row_stride` > 1: table rows lie that many row widths apart."""
        self.decoder = (decoder or tiny_decoder()).to(run_on.DEVICE)
        model = self.decoder.config
        pool_config = family(
            max_requests=slots,
            max_context=context,
            page_tokens=page,
            in_place_tokens=depth,
            **pool_options,
        )
        config = BackendConfig(
            pool=pool_config,
            kernels=run_on.KERNELS,
            deterministic=deterministic,
            max_batch_tokens=max_tokens,
            score_budget_bytes=score_budget_bytes,
        ).resolved(model)
        pool_class = registry.pool_class(config.pool)
        assert issubclass(pool_class, TablePool)
        self._guarded: dict[str, tuple[Tensor, Tensor]] = {}
        storage = {
            name: self._table(name, spec.shape, spec.dtype, row_stride)
            for name, spec in pool_class.storage_tables(config.pool, model).items()
        }
        self.pool = pool_class(config.pool, model, run_on.DEVICE, storage)
        kernels = build_kernels(model, config, run_on.DEVICE)
        self.backend = Backend(
            config=config,
            model=model,
            pool=self.pool,
            builder=self.pool.builder_class()(self.pool, config, kernels.fill),
            kernels=kernels,
        )
        self.builder, self.kernels = self.backend.builder, self.backend.kernels

    def _table(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, row_stride: int
    ) -> Tensor:
        rows, width = shape[0], shape[1:]
        if len(shape) == 1 or dtype == torch.int32:
            row_stride = 1
        wide = (rows + 2 * GUARD_ROWS, row_stride, *width)
        whole = torch.empty(wide, dtype=dtype, device=run_on.DEVICE)
        poison(whole)
        table = whole[GUARD_ROWS : GUARD_ROWS + rows, 0]
        self._guarded[name] = (whole, table)
        return table

    def assert_guards_intact(self) -> None:
        """Nothing was written in front of a table, behind it, or between strided rows."""
        for name, (whole, table) in self._guarded.items():
            rows = table.shape[0]
            outside = whole.clone()
            poison(outside[GUARD_ROWS : GUARD_ROWS + rows, 0])
            clean = torch.empty_like(outside)
            poison(clean)
            assert raw_bytes(outside) == raw_bytes(clean), f"{name}: written outside its rows"

    # request life

    def open(self, tokens: int | None = None) -> int:
        """A slot with room for `tokens` (default: max_context)."""
        slot = self.pool.acquire()
        self.pool.reserve(slot, tokens or self.pool.config.max_context)
        return slot

    def open_all(self, count: int) -> list[int]:
        return [self.open() for _ in range(count)]

    def commit(self, counts: Sequence[tuple[int, int]]) -> None:
        for slot, num_tokens in counts:
            self.pool.commit(slot, num_tokens)

    # forwards

    def poison_buffers(self) -> None:
        for buffers in (self.builder._buffers, self.builder._scratch):
            for tensor in buffers.tensors.values():
                poison(tensor)

    @torch.inference_mode()
    def run_batch(self, batch: ForwardBatch, probe: Probe | None = None) -> Tensor:
        """Logits of every token of the batch, padding included; commits nothing."""
        self.poison_buffers()
        self.builder.prepare(batch)
        epoch = self.builder.fill()
        with poisoned_outputs():
            streams = self.decoder(self.builder.metadata, epoch, self.kernels, probe)
            return self.decoder.logits(streams, self.kernels).cpu()

    def forward(
        self,
        requests: Requests,
        *,
        pad_tokens: int = 0,
        pad_requests: int = 0,
        probe: Probe | None = None,
    ) -> list[Tensor]:
        """[tokens, vocab] per request, in order; commits nothing."""
        batch = ForwardBatch.of(requests)
        if pad_tokens or pad_requests:
            batch = batch.padded(
                num_tokens=batch.num_tokens + pad_tokens,
                num_requests=len(requests) + pad_requests,
            )
        logits = self.run_batch(batch, probe)
        sizes = [len(ids) for _, ids in requests]
        return list(logits[: sum(sizes)].split(sizes))

    def feed(self, requests: Requests, **options: Any) -> list[Tensor]:
        """`forward`, then every token is committed."""
        logits = self.forward(requests, **options)
        self.commit([(slot, len(ids)) for slot, ids in requests if slot >= 0])
        return logits

    def feed_one(self, slot: int, ids: Sequence[int]) -> Tensor:
        return self.feed([(slot, ids)])[0]

    def verify(self, requests: Requests, accepted: Sequence[int]) -> list[Tensor]:
        """One forward of every request's tokens, of which the first `accepted` are kept."""
        logits = self.forward(requests)
        self.commit([(slot, n) for (slot, _), n in zip(requests, accepted, strict=True)])
        return logits

    @property
    def metadata(self) -> ForwardMetadata:
        return self.builder.metadata

    # what the pool holds

    def window_rows(self, slot: int, layer: int, positions: Sequence[int]) -> Tensor:
        ring = self.pool.geometry.ring_rows
        rows = torch.tensor([slot * ring + p % ring for p in positions])
        return self.pool.view(layer, Region.WINDOW).read(rows)

    def entry_rows(self, slot: int, layer: int, region: Region, count: int) -> Tensor:
        """The first `count` entries (or index keys) of a slot, by the block table."""
        ratio = self.pool.model.layers[layer].ratio
        per_page = self.pool.geometry.page_tokens // ratio
        base = self.pool.geometry.entry_base if region is Region.ENTRIES else 0
        table = self.pool.block_table[slot].tolist()
        rows = [base + table[e // per_page] * per_page + e % per_page for e in range(count)]
        return self.pool.view(layer, region).read(torch.tensor(rows, dtype=torch.int64))

    def slot_bytes(self, slot: int) -> dict[str, bytes]:
        """Stored bytes of all that belongs to a slot: its own rows, and its pages of every component."""
        pages = [page for page in self.pool.block_table[slot].tolist() if page >= 0]
        return {c.name: self._share(c, slot, pages) for c in self.pool.components()}

    @staticmethod
    def _share(component: Component, slot: int, pages: Sequence[int]) -> bytes:
        if component.format is None:
            return raw_bytes(component.storage[slot])
        rows = list(component.rows_of_slot(slot))
        for page in pages:
            rows += component.rows_of_page(page)
        found = component.format.export_rows(component.storage, torch.tensor(rows).long())
        return raw_bytes(found)

    def memory(self) -> dict[str, bytes]:
        """Stored bytes of every table."""
        return {name: raw_bytes(tensor) for name, tensor in self.pool.tensors.items()}
