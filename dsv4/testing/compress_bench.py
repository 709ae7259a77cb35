"""One compressor with its tables and plans, made without a pool or a builder: what `CompressConformance` drives.

Legend: T tokens, C channels of a projection, D channels of an entry, E closing windows, M pooled tokens,
S fold segments, J fold steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4.config import LayerKind
from dsv4.kernels.base import CompressKernel, Rounding
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.plans import CompressorTarget, FoldPlan, OverlapPlan, RopeTable
from dsv4.pool.formats import PlainRows
from dsv4.testing import reference
from dsv4.testing.expected import ExpectedForward, Sizes
from dsv4.testing.kernel_setup import INDEX_FORMATS, ROW_FORMATS, ints, rope_table
from dsv4.testing.memory import GuardedView, guarded_view, poisoned, tensor_bytes
from dsv4.testing.models import small_model
from dsv4.testing.script import EPS, Script, ScriptedCompressor

MAX_REQUESTS, CONTEXT = 3, 240


@frozen(kw_only=True)
class Variant:
    kind: LayerKind
    ratio: int
    margin: int
    """D."""

    def __str__(self) -> str:
        return f"{self.kind.value}-{self.ratio}-D{self.margin}"


class CompressBench:
    """Sequences in three slots; token ids are drawn once per slot, so that forwards can be repeated."""

    def __init__(
        self,
        kernel: CompressKernel,
        variant: Variant,
        device: torch.device,
        *,
        format_name: str = "fp32",
        dim: int = 24,
        indexer: bool = False,
    ) -> None:
        self.kernel, self.variant, self.device = kernel, variant, device
        self.model = small_model([(variant.kind, variant.ratio)], drafts=0)
        self.compressor = self._compressor(dim, indexer=indexer)
        ratio, margin = variant.ratio, variant.margin
        self.per_page = 3
        num_pages = -(-CONTEXT // (3 * ratio))
        # pages of the slots interleaved, and backwards
        every = list(range(MAX_REQUESTS * num_pages))[::-1]
        self.pages = [every[slot::MAX_REQUESTS] for slot in range(MAX_REQUESTS)]
        row_format = (
            INDEX_FORMATS[format_name](dim) if indexer else ROW_FORMATS[format_name](dim, 8)
        )
        self.table = guarded_view(row_format, 3 * len(every), device, spare_columns=64)
        width = self.compressor.id_VC.shape[1]
        csa = variant.kind is LayerKind.CSA
        self.ring_rows = 2 * ratio + margin - 1 if csa else margin
        state = PlainRows(torch.float32, width)
        self.state = guarded_view(state, MAX_REQUESTS * self.ring_rows, device, spare_columns=2)
        accumulator = PlainRows(torch.float32, 3 * dim + 1)
        self.accumulators = guarded_view(accumulator, MAX_REQUESTS, device, spare_columns=2)
        self.accumulators.view.storage[:, -1] = 0  # as acquire leaves it
        self.lengths = [0] * MAX_REQUESTS
        generator = torch.Generator().manual_seed(5)
        vocab = self.model.vocab_size
        self.ids: list[list[int]] = torch.randint(
            vocab, (MAX_REQUESTS, CONTEXT), generator=generator
        ).tolist()
        self.read_rows: set[int] = set()
        self.written_rows: set[int] = set()

    def _compressor(self, dim: int, *, indexer: bool) -> ScriptedCompressor:
        scripted = Script(self.model, seed=3).layers[0]
        chosen = scripted.index if indexer else scripted.main
        assert chosen is not None
        generator = torch.Generator().manual_seed(dim)
        factor = 4 if self.variant.kind is LayerKind.CSA else 2
        return ScriptedCompressor(
            layer=chosen.layer,
            dim=dim,
            rope_dim=chosen.rope_dim,
            id_VC=torch.randn(self.model.vocab_size, factor * dim, generator=generator),
            position_PC=torch.randn(CONTEXT, factor * dim, generator=generator) / 4,
            ape_MC=torch.randn(self.variant.ratio, factor * dim // 2, generator=generator),
            norm=torch.randn(dim, generator=generator).abs() + 0.5,
        )

    def forward(
        self,
        sizes: Mapping[int, int],
        *,
        keep: Mapping[int, int] | None = None,
        padding: int = 0,
        spare_lanes: int = 0,
        entry_locs: Callable[[int], int] = int,
        rounding: Rounding = Rounding.NONE,
    ) -> None:
        """One forward of `sizes` tokens by slot, of which `keep` (default: all) are committed. `spare_lanes` closing
        lanes close nothing; `entry_locs` may replace the rows that entries go to."""
        batch = ForwardBatch(
            slots=[*sizes, -1],
            query_lengths=[*sizes.values(), min(padding, 1)],
            token_ids=[0] * (sum(sizes.values()) + min(padding, 1)),
            num_tokens=sum(sizes.values()) + padding,
        )
        plan = self._expected(batch)
        own = [self.ids[t.slot][t.position] if t.slot >= 0 else 1 for t in plan.tokens]
        projected = self.compressor.projected(own, [t.position for t in plan.tokens])
        if padding:
            projected[[t.index for t in plan.tokens if t.slot < 0]] = torch.nan
        closing = plan.closing(self.variant.ratio)
        locs = [entry_locs(row) for row in plan.entry_locs(self.variant.ratio)]
        target = CompressorTarget(
            state_view=self.state.view,
            entry_view=self.table.view,
            entry_loc_E=ints([*locs, *[-1] * spare_lanes], self.device),
            pooled_EC=poisoned(
                [len(locs) + spare_lanes, self.compressor.dim], torch.float32, self.device
            ),
            accumulator_view=self.accumulators.view if self.variant.kind is LayerKind.HCA else None,
        )
        positions = [self.variant.ratio * c.entry for c in closing] + [0] * spare_lanes
        layer = self.compressor.layer
        turns = reference.frequencies(layer.rope_theta, self.compressor.rope_dim, layer.yarn)
        rope = rope_table(positions, turns, self.device)
        overlap = self.variant.kind is LayerKind.CSA
        made = (self._overlap if overlap else self._fold)(plan, rope, spare_lanes)
        (self.kernel.overlap if overlap else self.kernel.fold)(
            projected.to(self.device),
            ape_MC=self.compressor.ape_MC.to(self.device),
            norm=self.compressor.norm.to(self.device),
            eps=EPS,
            plan=made,  # type: ignore[arg-type]
            target=target,
            rounding=rounding,
        )
        for slot, num in sizes.items():
            self.lengths[slot] += num if keep is None else keep.get(slot, num)

    def _expected(self, batch: ForwardBatch) -> ExpectedForward:
        sizes = Sizes(
            max_requests=MAX_REQUESTS,
            window=1,
            ring_rows=self.variant.margin,
            margin=self.variant.margin,
            page_tokens=self.per_page * self.variant.ratio,
            entry_base=0,
        )
        return ExpectedForward(
            batch, model=self.model, sizes=sizes, lengths_by_slot=self.lengths, pages=self.pages
        )

    def _overlap(self, plan: ExpectedForward, rope: RopeTable, spare_lanes: int) -> OverlapPlan:
        ratio = self.variant.ratio
        sources = plan.overlap_sources(ratio) + [[-1] * 2 * ratio] * spare_lanes
        self._note(plan, sources)
        shaped = torch.tensor(sources, dtype=torch.int32, device=self.device)
        return OverlapPlan(
            ratio=ratio,
            in_place=max(plan.batch.query_lengths, default=0) <= self.variant.margin,
            ape_row_T=ints([t.position % ratio for t in plan.tokens], self.device),
            state_loc_T=ints(plan.state_loc(LayerKind.CSA, ratio), self.device),
            source_EM=shaped.view(-1, 2 * ratio),
            entry_rope=rope,
        )

    def _fold(self, plan: ExpectedForward, rope: RopeTable, spare_lanes: int) -> FoldPlan:
        ratio, device = self.variant.ratio, self.device
        num_closing = len(plan.closing(ratio))
        live = plan.fold_segments(ratio)
        segments = [*live[:num_closing], *[(-1, 0, [])] * spare_lanes, *live[num_closing:]]
        steps = max(1, *(len(places) for _, _, places in segments))
        sources = [_padded([row for _, row in places], steps) for _, _, places in segments]
        positions = [_padded([p for p, _ in places], steps, 0) for _, _, places in segments]
        self._note(plan, sources)
        requests = range(len(plan.batch.slots))
        closing = [c.request for c in plan.closing(ratio)]
        starts = [0, *itertools.accumulate(plan.batch.query_lengths)]
        return FoldPlan(
            ratio=ratio,
            in_place=max(plan.batch.query_lengths, default=0) <= self.variant.margin,
            starts_B1=ints(starts, device),
            closing_indptr_B1=ints(
                [sum(c < b for c in closing) for b in range(len(starts))], device
            ),
            ape_row_T=ints([t.position % ratio for t in plan.tokens], device),
            state_loc_T=ints(plan.state_loc(LayerKind.HCA, ratio), device),
            source_SJ=torch.tensor(sources, dtype=torch.int32, device=device),
            position_SJ=torch.tensor(positions, dtype=torch.int32, device=device),
            start_S=ints([start for _, start, _ in segments], device),
            accumulator_row_S=ints([row for row, _, _ in segments], device),
            accumulator_loc_B=ints(plan.accumulator_loc(), device),
            folded_B=ints([plan.folded(b) for b in requests], device),
            entry_rope=rope,
        )

    def _note(self, plan: ExpectedForward, sources: Sequence[Sequence[int]]) -> None:
        limit = self.state.view.num_rows
        self.read_rows = {row for one in sources for row in one if 0 <= row < limit}
        written = plan.state_loc(self.variant.kind, self.variant.ratio)
        self.written_rows = {row for row in written if row >= 0}

    # what came of it

    def closed(self, slot: int, *, of: int = 0) -> range:
        """Entries of the slot that are closed, from those of the first `of` tokens on."""
        return range(of // self.variant.ratio, self.lengths[slot] // self.variant.ratio)

    def rows_of(self, slot: int, entries: range) -> list[int]:
        """Table rows of entries, ascending."""
        return sorted(
            self.pages[slot][e // self.per_page] * self.per_page + e % self.per_page
            for e in entries
        )

    def entries(self, slot: int) -> Tensor:
        """fp32 [entries, D] of a slot, in order."""
        rows = [row for e in self.closed(slot) for row in self.rows_of(slot, range(e, e + 1))]
        return self.table.view.read(ints(rows, self.device)).cpu()

    def expected_entries(self, slot: int) -> list[list[float]]:
        tokens = self.ids[slot][: self.lengths[slot]]
        return [self.compressor.entry(tokens, e) for e in self.closed(slot)]

    def _tables(self) -> tuple[GuardedView, ...]:
        return self.table, self.state, self.accumulators

    def memory(self) -> list[Tensor]:
        """Bytes of all tables."""
        return [tensor_bytes(table.memory.whole) for table in self._tables()]

    def intact(self) -> bool:
        """Whether nothing around the tables was written."""
        return all(table.memory.intact() for table in self._tables())


def _padded(values: Sequence[int], width: int, filler: int = -1) -> list[int]:
    return [*values, *[filler] * (width - len(values))]
