"""Plays sequences of token ids through a pool and its metadata builder, and checks every row a forward may read.

The reference kernels move the rows; what the rows must hold follows from the ids alone (`script`). Nothing here knows
an address: a pool of any layout can be played.

Legend: N lanes, T tokens, D row values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsv4 import registry
from dsv4.config import ModelConfig, PoolConfig
from dsv4.kernels.base import KernelSet, Rounding
from dsv4.kernels.torch_set import TorchKernels
from dsv4.metadata.base import MetadataBuilder
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.forward import LayerMetadata
from dsv4.metadata.plans import CompressorTarget, FoldPlan, Source
from dsv4.pool.base import KVPool, KVView
from dsv4.testing.memory import Guarded, guarded
from dsv4.testing.models import backend_config
from dsv4.testing.script import EPS, Script, ScriptedCompressor

ENTRY_TOLERANCE = {"fp32": 1e-5, "bf16": 2**-8, "fp8": 2**-3.5, "fp4": 2**-1.5}
"""Error over the row's largest value, by format name: fp32 pooling against float64, then half a step of the format
(and a little, where the two fall on different sides of a step)."""


def build_pool(
    config: PoolConfig,
    model: ModelConfig,
    device: torch.device,
    memory: dict[str, Guarded] | None = None,
) -> KVPool:
    """A pool in poisoned memory with guard rows around every table; `memory` collects the tables."""
    pool_class = registry.pool_class(config)
    tables = {part.table: part.storage for part in pool_class(config, model, device).components()}
    blocks = {name: guarded(table.shape, table.dtype, device) for name, table in tables.items()}
    if memory is not None:
        memory |= blocks
    return pool_class(config, model, device, storage={n: b.inner for n, b in blocks.items()})


def build_builder(pool: KVPool, *, max_batch_tokens: int = 128) -> MetadataBuilder:
    """The pool's own metadata builder."""
    config = backend_config(pool.config, max_batch_tokens=max_batch_tokens)
    return pool.builder_class()(pool, config)


class Player:
    """Sequences in the slots of one pool."""

    def __init__(self, pool: KVPool, *, seed: int = 0, script: Script | None = None) -> None:
        self.pool = pool
        self.builder = build_builder(pool)
        self.kernels: KernelSet = TorchKernels.build(deterministic=True)
        self.script = script or Script(pool.model, seed=seed)
        self.tokens: dict[int, list[int]] = {}
        """Committed ids by slot."""

    # request life

    def start(self, total_tokens: int) -> int:
        """Acquire a slot and reserve."""
        slot = self.pool.acquire()
        self.pool.reserve(slot, total_tokens)
        self.tokens[slot] = []
        return slot

    def release(self, slot: int) -> None:
        self.pool.release(slot)
        del self.tokens[slot]

    def fork(self, slot: int) -> int:
        other = self.pool.fork(slot)
        self.tokens[other] = list(self.tokens[slot])
        return other

    def rollback(self, slot: int, length: int) -> None:
        self.pool.rollback(slot, length)
        del self.tokens[slot][length:]

    def commit(self, slot: int, ids: Sequence[int]) -> None:
        self.pool.commit(slot, len(ids))
        self.tokens[slot] += ids

    def extend(self, slot: int, ids: Sequence[int], *, step: int | None = None) -> None:
        """Forward and commit ids, `step` of them at a time."""
        for start in range(0, len(ids), step or max(1, len(ids))):
            self.forward({slot: ids[start : start + step] if step else ids})

    # one forward

    def forward(
        self,
        new: Mapping[int, Sequence[int]],
        *,
        commit: bool = True,
        idle: Sequence[int] = (),
        padding: int = 0,
    ) -> None:
        """One ragged forward of new ids by slot; `idle` slots take part with no token, padding adds tokens
        and a request that are nobody's."""
        pairs = [*new.items(), *((slot, ()) for slot in idle)]
        batch = ForwardBatch.of(pairs)
        if padding:
            num_requests = min(len(pairs) + 1, self.pool.geometry.max_requests)
            batch = batch.padded(num_tokens=batch.num_tokens + padding, num_requests=num_requests)
        self.builder.prepare(batch)
        epoch = self.builder.fill()
        places = self._places(batch)
        for index in range(len(self.pool.model.layers)):
            self._layer(index, self.builder.metadata.for_layer(index, epoch), places)
        self._write_streams(new)
        if commit:
            for slot, ids in new.items():
                self.commit(slot, ids)

    def _places(self, batch: ForwardBatch) -> list[tuple[int, list[int], int]]:
        """(slot, all ids of its sequence, position) per token; slot -1 for padding."""
        places: list[tuple[int, list[int], int]] = []
        for slot, num in zip(batch.slots, batch.query_lengths, strict=True):
            old = self.tokens.get(slot, [])
            ids = [*old, *batch.token_ids[len(places) : len(places) + num]]
            places += [(slot, ids, len(old) + i) for i in range(num)]
        return places + [(-1, [0], 0)] * (batch.num_tokens - len(places))

    def _layer(
        self, index: int, meta: LayerMetadata, places: list[tuple[int, list[int], int]]
    ) -> None:
        scripted, view = self.script.layers[index], meta.window_view
        own = [ids[position] for _, ids, position in places]
        positions = [position for _, _, position in places]
        kv_TD = scripted.window(own, positions).to(self.pool.device)
        fresh_TD = meta.workspace.fresh_TD
        if fresh_TD is not None:
            fresh_TD.copy_(view.format.round(kv_TD))
        view.write(meta.store_loc_T, kv_TD)
        for compressor, target in ((scripted.main, meta.main), (scripted.index, meta.index)):
            if compressor is not None and target is not None:
                self._compress(compressor, meta, target, compressor.projected(own, positions))
        self._check_window(index, meta.sources[0], places)
        self._check_entries(index, meta, places)
        if meta.tail_loc_T is not None and fresh_TD is not None:
            view.write(meta.tail_loc_T, fresh_TD)

    def _compress(
        self,
        compressor: ScriptedCompressor,
        meta: LayerMetadata,
        target: CompressorTarget,
        projected_TC: Tensor,
    ) -> None:
        device = self.pool.device
        plan = meta.state_plan
        run = (
            self.kernels.compress.fold
            if isinstance(plan, FoldPlan)
            else self.kernels.compress.overlap
        )
        run(
            projected_TC.to(device),
            ape_MC=compressor.ape_MC.to(device),
            norm=compressor.norm.to(device),
            eps=EPS,
            plan=plan,  # type: ignore[arg-type]
            target=target,
            rounding=Rounding.NONE,
        )

    def _check_window(
        self, index: int, source: Source, places: list[tuple[int, list[int], int]]
    ) -> None:
        """Every token reads its window in position order: table rows and fresh rows, to the last bit."""
        window = self.pool.model.sliding_window
        ids: list[int] = []
        positions: list[int] = []
        counts = []
        for slot, sequence, position in places:
            seen = range(max(0, position + 1 - window), position + 1) if slot >= 0 else range(0)
            ids += [sequence[p] for p in seen]
            positions += seen
            counts.append(len(seen))
        indptr = source.stream.indptr_T1
        assert indptr.diff().tolist() == counts, f"layer {index}: window lengths"
        rows = source.stream.indices_N[: len(ids)]
        wanted_ND = source.view.format.round(self.script.layers[index].window(ids, positions))
        read_ND = read_source(source, rows).cpu()
        wrong = (read_ND != wanted_ND).any(-1).nonzero().flatten().tolist()
        assert not wrong, f"layer {index}: window rows {rows[wrong].tolist()} hold something else"

    def _check_entries(
        self, index: int, meta: LayerMetadata, places: list[tuple[int, list[int], int]]
    ) -> None:
        """Every token can read exactly the entries, and index keys, whose windows have closed."""
        scripted = self.script.layers[index]
        if scripted.main is None:
            return
        ratio, source = scripted.main.layer.ratio, meta.sources[1]
        lanes = [
            (t, slot, sequence, entry)
            for t, (slot, sequence, position) in enumerate(places)
            for entry in range((position + 1) // ratio if slot >= 0 else 0)
        ]
        device = self.pool.device
        slots = torch.tensor([lane[1] for lane in lanes], dtype=torch.int32, device=device)
        entries = torch.tensor([lane[3] for lane in lanes], dtype=torch.int32, device=device)
        inputs, output = meta.score_inputs, meta.select_output
        if inputs is None or output is None or scripted.index is None:
            rows = source.stream.indices_N[: len(lanes)]
            counts = [sum(lane[0] == t for lane in lanes) for t in range(len(places))]
            assert source.stream.indptr_T1.diff().tolist() == counts, f"layer {index}: entry counts"
        else:
            rows = output.rows.rows(slots, entries)
            wanted = [scripted.index.entry(lane[2], lane[3]) for lane in lanes]
            self._compare(
                index, "index keys", inputs.view, inputs.keys.rows(slots, entries), wanted
            )
        wanted = [scripted.main.entry(lane[2], lane[3]) for lane in lanes]
        self._compare(index, "entries", source.view, rows, wanted)

    @staticmethod
    def _compare(
        index: int, what: str, view: KVView, rows: Tensor, wanted: list[list[float]]
    ) -> None:
        if not wanted:
            return
        assert 0 <= int(rows.min()) <= int(rows.max()) < view.num_rows, f"layer {index}: {what}"
        wanted_ND = torch.tensor(wanted, dtype=torch.float64)
        error_N = (view.read(rows).cpu().double() - wanted_ND).abs().amax(-1)
        limit_N = ENTRY_TOLERANCE[view.format.name] * wanted_ND.abs().amax(-1)
        wrong = (~(error_N <= limit_N)).nonzero().flatten().tolist()
        assert not wrong, (
            f"layer {index}: {what} in rows {rows[wrong].tolist()} are not those of the tokens"
        )

    # residual streams of the newest token: what a draft layer continues from

    def _write_streams(self, new: Mapping[int, Sequence[int]]) -> None:
        if self.pool.last_streams is not None:
            for slot, ids in new.items():
                end = len(self.tokens[slot]) + len(ids)
                if ids:
                    self.pool.last_streams[slot] = self.script.streams(ids[-1], end - 1)

    def check_streams(self, slot: int) -> None:
        """The slot still holds the streams of its last committed token."""
        if self.pool.last_streams is not None:
            ids = self.tokens[slot]
            wanted = self.script.streams(ids[-1], len(ids) - 1)
            assert torch.equal(self.pool.last_streams[slot].cpu(), wanted), (
                f"streams of slot {slot}"
            )


def read_source(source: Source, rows: Tensor) -> Tensor:
    """fp32 values of row indices: the table's below num_rows, this forward's fresh rows above."""
    num_rows = source.view.num_rows
    limit = num_rows + (0 if source.fresh_TD is None else source.fresh_TD.shape[0])
    legal = bool(((rows >= 0) & (rows < limit)).all())
    assert legal, f"rows {rows.tolist()} are not all in [0, {limit})"
    values = source.view.read(torch.where(rows < num_rows, rows, 0))
    if source.fresh_TD is None:
        return values
    fresh = source.fresh_TD[(rows - num_rows).clamp(min=0).long()]
    return torch.where((rows < num_rows).unsqueeze(-1), values, fresh)
