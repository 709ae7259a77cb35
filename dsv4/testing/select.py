"""Conformance of a SelectKernel.

Legend: T tokens, N entries, K picks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsv4.kernels.base import SelectKernel
from dsv4.metadata.buffers import select_scratch
from dsv4.metadata.plans import IndexStream, ScoreInputs, SelectOutput
from dsv4.pool.base import KVView
from dsv4.pool.formats import PlainRows
from dsv4.pool.geometry import PagedRows
from dsv4.testing.kernel_setup import KernelSetup, Randn, ints
from dsv4.testing.memory import poisoned

PER_PAGE, BASE = 3, 50
PAGES = [[4, 0, 9, 2, 11], [7, 10, 1, 3, 12]]
SLOTS = [1, 1, -1, 0, 1, 0]
VISIBLE = [4, 13, 0, 1, 6, 15]
INF, NAN = math.inf, math.nan


def best(scores: Sequence[float], visible: int, topk: int) -> list[int]:
    """The best entries in ascending order: NaN and -inf last, the lower entry before its equals."""
    order = sorted(range(visible), key=lambda e: (-_rank(scores[e]), e))
    return sorted(order[:topk])


def _rank(score: float) -> float:
    return -INF if math.isnan(score) else score


class SelectConformance(KernelSetup[SelectKernel]):
    """Subclass and give the fixture `kernel`."""

    def check(
        self,
        kernel: SelectKernel,
        scores_TN: Tensor,
        topk: int,
        *,
        tile: int | None = None,
        slots: Sequence[int] = SLOTS,
        visible: Sequence[int] = VISIBLE,
    ) -> None:
        """The whole stream buffer against a sort in Python."""
        device, tokens = scores_TN.device, len(slots)
        width = min(topk, scores_TN.shape[1])
        counts = [min(width, v) for v in visible]
        starts = [sum(counts[:t]) for t in range(tokens + 1)]
        spare = iter(range(starts[-1], tokens * width))
        lanes = [
            [starts[t] + k if k < counts[t] else next(spare) for k in range(width)]
            for t in range(tokens)
        ]
        buffer = poisoned([tokens * width + 4], torch.int32, device)
        paged = PagedRows(
            block_table=torch.tensor(PAGES, dtype=torch.int32, device=device),
            rows_per_page=PER_PAGE,
            base=BASE,
        )
        stream = IndexStream(ints(starts, device), buffer[: tokens * width], width, final=False)
        lane_TK = torch.tensor(lanes, dtype=torch.int32, device=device).view(tokens, width)
        scratch = poisoned([select_scratch(scores_TN.numel(), tokens, width)], torch.int32, device)
        output = SelectOutput(stream=stream, scratch=scratch, lane_TK=lane_TK, rows=paged)
        inputs = ScoreInputs(
            view=KVView(torch.empty(0, 1), 0, PlainRows(torch.float32, 1)),
            keys=paged,
            slot_T=ints(slots, device),
            num_visible_T=ints(visible, device),
            max_entries=scores_TN.shape[1],
            query_lengths=(tokens,),
            request_slots_B=ints([0], device),
            tile_tokens=tokens,
        )
        for first in range(0, tokens, tile or tokens):
            own = scores_TN[first : first + (tile or tokens)]
            kernel.select(own, inputs, output, first_token=first)
        wanted = [
            BASE + PAGES[slot][e // PER_PAGE] * PER_PAGE + e % PER_PAGE
            for t, slot in enumerate(slots)
            for e in best(scores_TN[t].tolist(), visible[t], width)
        ]
        wanted += [-1] * (tokens * width - len(wanted)) + [2**31 - 1] * 4
        assert buffer.tolist() == wanted

    @pytest.mark.parametrize("topk", [1, 2, 3, 7, 15, 40])
    @pytest.mark.parametrize("tile", [None, 1, 4])
    def test_1_the_rows_of_the_best_entries_in_ascending_entry_order(
        self, kernel: SelectKernel, randn: Randn, topk: int, tile: int | None
    ) -> None:
        """1. Per token, the rows of the min(K, n_vis) best entries, in ascending entry order."""
        scores_TN = randn(len(SLOTS), 15)
        # what stands behind n_vis does not matter, however good
        for t, visible in enumerate(VISIBLE):
            scores_TN[t, visible:] = [INF, NAN, 99.0, -INF][t % 4]
        self.check(kernel, scores_TN, topk, tile=tile)

    @pytest.mark.parametrize("topk", [1, 3, 6, 14])
    @pytest.mark.parametrize(
        "row",
        [
            [0.0] * 15,
            [-0.0, 0.0] * 7 + [0.0],
            [NAN] * 15,
            [-INF] * 15,
            [INF] * 15,
            [NAN, -INF, 1.0, NAN, -INF, 2.0, -INF, NAN, 1.0, 2.0, NAN, 1.0, -INF, 2.0, NAN],
            [-1.0, -2.0, -3.0, -1e-42, 1e-42, 0.0, -0.0, -INF, NAN, INF, 3e38, -3e38, 2.0, 2.0, 1.0],
            [float(e // 4) for e in range(15)],
            [float(-(e // 4)) for e in range(15)],
        ],
    )  # fmt: skip
    def test_2_nan_and_minus_infinity_sort_last_and_the_lower_entry_wins_a_tie(
        self, kernel: SelectKernel, device: torch.device, row: list[float], topk: int
    ) -> None:
        """2. NaN and -inf sort last, the lower entry wins a tie."""
        scores_TN = torch.tensor([row] * len(SLOTS), device=device)
        self.check(kernel, scores_TN, topk)

    def test_3_every_lane_that_belongs_to_the_tokens_is_written(
        self, kernel: SelectKernel, randn: Randn, device: torch.device
    ) -> None:
        """3. Every lane that belongs to the tokens is written, -1 behind a token's picks; nothing beside them."""
        for visible in ([0] * 6, [1, 0, 0, 1, 0, 2], [15, 15, 0, 15, 15, 15]):
            self.check(kernel, randn(6, 15), 4, visible=visible)
        self.check(kernel, torch.empty(6, 0, device=device), 4, visible=[0] * 6)
        self.check(kernel, randn(1, 3), 2, slots=[0], visible=[3])
