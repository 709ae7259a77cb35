"""Conformance of an AttentionKernel.

Legend: T tokens, H heads, K rows a token reads, R rows of a table, D head dim.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import AttentionKernel
from dsv4.metadata.plans import IndexStream, Source
from dsv4.testing.kernel_setup import NO_ROWS, ROW_FORMATS, KernelSetup, Randn, ints
from dsv4.testing.memory import GuardedView, guarded_view, poisoned, same_bytes, strided

HEADS = 3
Lists = Sequence[Sequence[int]]


def stream_of(
    lists: Lists, device: torch.device, *, spare: int = 0, capacity: int | None = None
) -> IndexStream:
    """A ragged stream in a larger buffer of 2^31 - 1; capacity above the longest list as a bucket would have it."""
    flat = [row for one in lists for row in one]
    ends = [sum(map(len, lists[:i])) for i in range(len(lists) + 1)]
    longest = max(map(len, lists), default=0) if capacity is None else capacity
    buffer = poisoned([max(len(flat), longest * len(lists)) + spare], torch.int32, device)
    buffer[: len(flat)] = ints(flat, device)
    return IndexStream(ints(ends, device), buffer, longest, final=False)


@frozen(eq=False)
class Table:
    """A poisoned table of which some rows hold values, and what they hold."""

    guarded: GuardedView
    values: dict[int, Tensor]

    @classmethod
    def filled(cls, name: str, dim: int, num_rows: int, rows: Sequence[int], randn: Randn) -> Table:
        device = randn(1).device
        table = guarded_view(ROW_FORMATS[name](dim, 8), num_rows, device, spare_columns=64)
        values_KD = randn(len(rows), dim)
        table.view.write(ints(rows, device), values_KD)
        read_KD = table.view.format.round(values_KD).cpu().double()
        return cls(table, dict(zip(rows, read_KD, strict=True)))

    def source(self, lists: Lists, *, fresh_TD: Tensor | None = None, spare: int = 0) -> Source:
        view = self.guarded.view
        stream = stream_of(lists, view.storage.device, spare=spare)
        return Source(view, stream, fresh_TD)

    def rows_of(self, one: Sequence[int], fresh_TD: Tensor | None = None) -> list[Tensor]:
        """Values of the indices that are rows; whatever else a list holds is no row."""
        limit = self.guarded.view.num_rows
        fresh = [] if fresh_TD is None else list(fresh_TD.cpu().double())
        found = []
        for row in one:
            if 0 <= row < limit:
                found.append(self.values[row])
            elif 0 <= row - limit < len(fresh):
                found.append(fresh[row - limit])
        return found


def expected(
    q_THD: Tensor, rows: Sequence[Sequence[Tensor]], sink_H: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """float64, token by token and head by head: output [T, H, D] and log-sum-exp of the keys [T, H]."""
    q_THD = q_THD.cpu().double()
    out_THD = torch.zeros_like(q_THD)
    lse_TH = torch.full(q_THD.shape[:2], -math.inf, dtype=torch.float64)
    for t, own in enumerate(rows):
        for h, sink in enumerate(sink_H.tolist()):
            if not own:
                continue
            rows_KD = torch.stack(list(own))
            scores_K = scale * (rows_KD @ q_THD[t, h])
            lse_TH[t, h] = torch.logsumexp(scores_K, 0)
            shift = max(scores_K.max().item(), sink)
            if shift < math.inf:
                weights_K = torch.exp(scores_K - shift)
                mass = weights_K.sum() + math.exp(sink - shift)
                out_THD[t, h] = weights_K @ rows_KD / mass
    return out_THD, lse_TH


class AttentionConformance(KernelSetup[AttentionKernel]):
    """Subclass and give the fixture `kernel`."""

    def run(
        self,
        kernel: AttentionKernel,
        q_THD: Tensor,
        sources: Sequence[Source],
        sink_H: Tensor,
        scale: float = 0.3,
    ) -> tuple[Tensor, Tensor]:
        """Attend into poisoned outputs with odd strides."""
        out_THD = strided(poisoned(q_THD.shape, q_THD.dtype, q_THD.device))
        lse_TH = poisoned(q_THD.shape[:2], torch.float32, q_THD.device)
        kernel.attend(q_THD, sources, sink_H, scale=scale, out_THD=out_THD, lse_TH=lse_TH)
        without = poisoned(q_THD.shape, q_THD.dtype, q_THD.device)
        kernel.attend(q_THD, sources, sink_H, scale=scale, out_THD=without)
        assert same_bytes(without, out_THD), "asking for lse changes the output"
        return out_THD, lse_TH

    def check(
        self,
        kernel: AttentionKernel,
        q_THD: Tensor,
        parts: Sequence[tuple[Table, Lists, Tensor | None]],
        sink_H: Tensor,
    ) -> None:
        """Output and lse of (table, lists, fresh rows) segments against float64."""
        sources = [
            table.source(lists, fresh_TD=fresh, spare=i)
            for i, (table, lists, fresh) in enumerate(parts)
        ]
        out_THD, lse_TH = self.run(kernel, q_THD, sources, sink_H)
        rows = [
            [row for table, lists, fresh in parts for row in table.rows_of(lists[t], fresh)]
            for t in range(q_THD.shape[0])
        ]
        wanted_THD, wanted_TH = expected(q_THD, rows, sink_H, 0.3)
        self.close(out_THD, wanted_THD, scale=5)
        self.close(lse_TH, wanted_TH, scale=5)

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
    @pytest.mark.parametrize("dim", [24, 80])
    def test_1_one_softmax_over_the_rows_of_all_sources(
        self, kernel: AttentionKernel, randn: Randn, name: str, dim: int
    ) -> None:
        """1. One softmax over the rows of all sources: two segments of one table, of two tables, and three."""
        rows = list(range(0, 29, 2))
        table, other = (
            Table.filled(name, dim, 29, rows, randn),
            Table.filled(name, dim, 17, [0, 3, 16], randn),
        )
        fresh_TD = randn(4, dim)
        window = [[28, 0, 2], [4], [29, 30, 6], [31, 32]]  # 29 and above are fresh rows
        entries = [[], [8, 10, 12, 14, 16], [18], [20, 0]]
        more = [[0, 3], [16], [], [3, 16, 0, 3]]
        q_THD, sink_H = randn(4, HEADS, dim), randn(HEADS)
        for q in (q_THD, strided(q_THD)):
            self.check(kernel, q, [(table, window, fresh_TD), (table, entries, None)], sink_H)
            self.check(kernel, q, [(table, window, fresh_TD), (other, more, None)], sink_H)
            parts = [(table, window, fresh_TD), (table, entries, None), (other, more, None)]
            self.check(kernel, q, parts, sink_H)
            self.check(kernel, q, [(other, more, None)], sink_H)

    @pytest.mark.parametrize(
        ("window", "entries"), [(1, 0), (7, 63), (128, 130), (64, 64), (65, 1)]
    )
    def test_1_lists_of_any_length(
        self, kernel: AttentionKernel, randn: Randn, window: int, entries: int
    ) -> None:
        """1. Lists that end inside, on and behind the border of any tile, and tokens of different lengths."""
        table = Table.filled("fp32", 40, 150, range(150), randn)
        source = random.Random(window)
        sizes = [(window, entries), (window // 2, entries), (1, entries // 3), (window, 0), (0, 0)]
        lists = [[source.sample(range(150), k=n) for n in pair] for pair in sizes]
        parts = [
            (table, [pair[0] for pair in lists], None),
            (table, [pair[1] for pair in lists], None),
        ]
        self.check(kernel, randn(5, HEADS, 40), parts, randn(HEADS))

    def test_1_many_tokens_of_wide_rows(self, kernel: AttentionKernel, randn: Randn) -> None:
        """1. More tokens than a tile of gathered rows can hold."""
        table = Table.filled("fp32", 512, 140, range(140), randn)
        lists = [list(range(t, t + 128)) for t in range(12)]
        q_THD = randn(12, 2, 512) / 8
        self.check(kernel, q_THD, [(table, lists, None)], randn(2))

    @pytest.mark.parametrize("sink", [-math.inf, -50.0, 0.0, 3.0, 200.0, math.inf])
    def test_2_the_sink_enters_the_denominator_once(
        self, kernel: AttentionKernel, randn: Randn, sink: float
    ) -> None:
        """2. The sink enters the denominator once, and only there: also an infinite one."""
        table = Table.filled("fp32", 24, 9, range(9), randn)
        sink_H = torch.tensor([sink, 0.5, sink], device=randn(1).device)
        lists, more = [[0, 1, 2], [], [3]], [[4], [], [5, 6, 7, 8]]
        parts = [(table, lists, None), (table, more, None)]
        self.check(kernel, randn(3, HEADS, 24), parts, sink_H)

    @pytest.mark.parametrize("sink", [-math.inf, 0.0, math.inf])
    def test_3_a_token_without_rows_gives_output_0_and_lse_minus_infinity(
        self, kernel: AttentionKernel, randn: Randn, sink: float
    ) -> None:
        """3. A token without rows: output 0, lse -inf, whatever the sink; also if no token has any."""
        table = Table.filled("fp32", 24, 9, range(9), randn)
        device = randn(1).device
        sink_H = torch.full((HEADS,), sink, device=device)
        empty: Lists = [[], [-1, 2**31 - 1], []]
        for lists in (empty, [[1], [], [2, 3]], [[], [], []]):
            out_THD, lse_TH = self.run(
                kernel, randn(3, HEADS, 24), [table.source(lists), table.source(empty)], sink_H
            )
            for t, one in enumerate(lists):
                if not table.rows_of(one):
                    assert torch.equal(out_THD[t], torch.zeros_like(out_THD[t]))
                    assert bool((lse_TH[t] == -math.inf).all())
        out_THD, lse_TH = self.run(kernel, randn(0, HEADS, 24), [table.source([])], sink_H)
        assert (out_THD.numel(), lse_TH.numel()) == (0, 0)

    @pytest.mark.parametrize("name", ["fp32", "fp8"])
    def test_4_an_index_outside_the_rows_is_no_row_whatever_its_value(
        self, kernel: AttentionKernel, randn: Randn, name: str
    ) -> None:
        """4. An index outside [0, rows + fresh) is no row, whatever its value: INT_MIN, -1, R + fresh, INT_MAX."""
        table = Table.filled(name, 24, 13, [0, 5, 12], randn)
        fresh_TD = randn(3, 24)
        lists = [
            [*NO_ROWS, 0, 13 + 3, 5],
            [12, 13, 15, 13 + 3, 13 + 4, -13],
            [*NO_ROWS],
        ]
        more = [[13, 12, 14], [-1], [0, *NO_ROWS, 2**30]]
        parts = [(table, lists, fresh_TD), (table, more, None)]
        self.check(kernel, randn(3, HEADS, 24), parts, randn(HEADS))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_5_every_output_lane_is_written(
        self, kernel: AttentionKernel, randn: Randn, dtype: torch.dtype
    ) -> None:
        """5. Every output lane is written, of tokens with and without rows, into outputs of NaN; nothing beside."""
        table = Table.filled("bf16", 24, 9, range(9), randn)
        q_THD = randn(5, HEADS, 24).to(dtype)
        device = q_THD.device
        whole_THD = poisoned([9, HEADS, 24], dtype, device)
        lists = [[0], [], [1, 2, 3], [], [-1]]
        kernel.attend(q_THD, [table.source(lists)], randn(HEADS), scale=0.2, out_THD=whole_THD[2:7])
        assert not torch.isnan(whole_THD[2:7]).any()
        assert torch.isnan(whole_THD[:2]).all()
        assert torch.isnan(whole_THD[7:]).all()
        assert table.guarded.memory.intact()

    def test_6_a_tokens_result_depends_on_its_own_rows_alone(
        self, kernel: AttentionKernel, randn: Randn
    ) -> None:
        """6. A token's result depends on its own rows alone: not on the queries, rows and lists of other tokens."""
        table = Table.filled("fp32", 24, 20, range(12), randn)
        q_THD, sink_H = randn(4, HEADS, 24), randn(HEADS)
        lists, more = [[0, 1], [2], [3, 4, 5], []], [[6], [7, 8], [9, 10], [11]]
        before, _ = self.run(kernel, q_THD, [table.source(lists), table.source(more)], sink_H)
        spoiled_THD = q_THD.clone()
        spoiled_THD[[0, 2, 3]] = torch.nan
        # rows 12 and up hold NaN
        bad, worse = [[12, 0], [2], [13, 14, 15], [16]], [[17], [7, 8], [12, 19], [12]]
        out, _ = self.run(kernel, spoiled_THD, [table.source(bad), table.source(worse)], sink_H)
        assert same_bytes(out[1], before[1])

    def test_6_the_capacity_of_a_stream_does_not_matter(
        self, kernel: AttentionKernel, randn: Randn
    ) -> None:
        """6. A bucket's capacity above every list's length changes nothing but, at most, the last bits."""
        table = Table.filled("fp32", 24, 20, range(20), randn)
        q_THD, sink_H = randn(3, HEADS, 24), randn(HEADS)
        lists: Lists = [[0, 1, 2], [], [3, 4, 5, 6]]
        tight, _ = self.run(kernel, q_THD, [table.source(lists)], sink_H)
        view = table.guarded.view
        loose = Source(view, stream_of(lists, view.storage.device, capacity=50))
        out, _ = self.run(kernel, q_THD, [loose], sink_H)
        self.close(out, tight.cpu())
