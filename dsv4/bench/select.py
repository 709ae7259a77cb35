"""Top-k of score rows, written as table rows of ascending entries.

Legend: T tokens, N entries, K picks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.case import Case, Setup
from dsv4.bench.shapes import PAGE_ENTRIES
from dsv4.metadata.buffers import SPLIT_PROGRAMS, select_scratch
from dsv4.metadata.fill_ref import selected_lanes
from dsv4.metadata.plans import IndexStream, ScoreInputs, SelectOutput
from dsv4.pool.base import KVView
from dsv4.pool.geometry import PagedRows
from dsv4.pool.rows import PlainRows

TOPK = {"flash": 512, "pro": 1024}
SMALL_TOPK = {"flash": 32, "pro": 48}
SHAPES = (
    (1, 32_768), (64, 32_768), (256, 32_768), (8, 262_144), (64, 262_144), (4096, 32_768),
)  # fmt: skip
SMALL_SHAPES = ((1, 130), (3, 70), (9, 20))
SCORE_BUDGET = 1 << 30
"""Scores of all calls of a case: 4 GB."""


@frozen(kw_only=True, eq=False)
class _Inputs:
    scores_TN: Tensor
    score: ScoreInputs
    output: SelectOutput


def cases(setup: Setup) -> Iterator[Case]:
    """K of flash and of pro."""
    topks, shapes = (SMALL_TOPK, SMALL_SHAPES) if setup.small else (TOPK, SHAPES)
    for name in setup.models:
        for tokens, entries in shapes:
            yield _case(setup, name, topks[name], tokens, entries)


def _case(setup: Setup, name: str, topk: int, tokens: int, entries: int) -> Case:
    num_calls = setup.num_calls(tokens * entries, SCORE_BUDGET)
    inputs = [_inputs(setup, topk, tokens, entries) for _ in range(num_calls)]

    def run(one: _Inputs) -> None:
        setup.kernels.select.select(one.scores_TN, one.score, one.output, first_token=0)

    def check() -> float:
        inputs[0].output.stream.indices_N.fill_(2**31 - 1)
        run(inputs[0])
        return _error(inputs[0], min(topk, entries))

    picked = tokens * min(topk, entries)
    return Case(
        name=name,
        size=f"{tokens:,} x {entries:,}",
        calls=[functools.partial(run, one) for one in inputs],
        check=check,
        tolerance=0.0,
        nbytes=4.0 * (tokens * entries + 2 * picked),
    )


def _inputs(setup: Setup, topk: int, tokens: int, entries: int) -> _Inputs:
    """Each token is a request of its own; scores are normally distributed."""
    device, width = setup.device, min(topk, entries)
    pages = -(-entries // PAGE_ENTRIES)
    block_table = torch.randperm(tokens * pages, device=device).int().view(tokens, pages)
    rows = PagedRows(block_table=block_table, rows_per_page=PAGE_ENTRIES, base=128)
    visible_T = torch.full((tokens,), entries, dtype=torch.int32, device=device)
    slots_T = torch.arange(tokens, dtype=torch.int32, device=device)
    indptr, lane_TK = selected_lanes(visible_T, width)
    indices = torch.empty(tokens * width, dtype=torch.int32, device=device)
    scratch = select_scratch(tokens * entries, min(tokens, SPLIT_PROGRAMS), topk)
    keys = KVView(torch.empty(0, 1, device=device), 0, PlainRows(torch.float32, 1))
    return _Inputs(
        scores_TN=torch.randn(tokens, entries, device=device),
        score=ScoreInputs(
            view=keys, keys=rows, slot_T=slots_T, num_visible_T=visible_T, max_entries=entries,
            query_lengths=(1,) * tokens, request_slots_B=slots_T, tile_tokens=tokens,
        ),
        output=SelectOutput(
            stream=IndexStream(indptr, indices, width, final=False),
            scratch=torch.empty(scratch, dtype=torch.int32, device=device),
            lane_TK=lane_TK,
            rows=rows,
        ),
    )  # fmt: skip


def _error(one: _Inputs, width: int) -> float:
    """0 if every token's rows are those of its best entries, ascending; else infinite. Equal scores: lower entry."""
    order = torch.sort(one.scores_TN.double(), dim=-1, descending=True, stable=True).indices
    best_TK = order[:, :width].sort(dim=-1).values.int()
    wanted_TK = one.output.rows.rows(one.score.slot_T.unsqueeze(1), best_TK)
    same = torch.equal(one.output.stream.indices_N.view_as(wanted_TK), wanted_TK)
    return 0.0 if same else float("inf")
