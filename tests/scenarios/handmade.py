"""Inputs of single kernels, built by hand from plain lists, and what they must give, by brute force.

Legend: T tokens, H heads, D head dim, R table rows, N lanes or entries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.metadata.buffers import select_scratch
from dsv4.metadata.plans import IndexStream, ScoreInputs, SelectOutput, Source
from dsv4.pool.base import KVView
from dsv4.pool.formats import PlainRows
from dsv4.pool.geometry import PagedRows
from tests import run_on

POISON_INT = 2**31 - 1


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=run_on.generator(seed))


def table(rows_RD: Tensor) -> KVView:
    """An fp32 table of these rows."""
    return KVView(rows_RD.clone(), len(rows_RD), PlainRows(torch.float32, rows_RD.shape[1]))


def stream(
    lists: Sequence[Sequence[int]], *, width: int, behind: Tensor | None = None
) -> IndexStream:
    """Each token's row list, packed; the lanes behind them hold `behind`, else -1."""
    sizes = torch.tensor([0, *map(len, lists)])
    packed = [row for rows in lists for row in rows]
    indices = torch.full((max(1, len(lists) * width),), -1, dtype=torch.int32)
    if behind is not None:
        indices.copy_(behind[: len(indices)])
    indices[: len(packed)] = torch.tensor(packed, dtype=torch.int32)
    return IndexStream(sizes.cumsum(0).int(), indices, width)


def source(view: KVView, lists: Sequence[Sequence[int]], *, width: int) -> Source:
    return Source(view, stream(lists, width=width))


def attention(
    q_THD: Tensor, rows: Sequence[Tensor], sink_H: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and lse of tokens that read these rows [N, D], in float64, token by token."""
    outs, sums = [], []
    for q_HD, rows_ND in zip(q_THD.double(), rows, strict=True):
        scores = q_HD @ rows_ND.double().T * scale
        mass = torch.exp(scores).sum(-1)
        total = mass + torch.exp(sink_H.double())
        outs.append(torch.exp(scores) @ rows_ND.double() / total.unsqueeze(-1))
        sums.append(torch.log(mass))
    return torch.stack(outs).float(), torch.stack(sums).float()


def score_inputs(
    view: KVView,
    num_visible: Sequence[int],
    *,
    width: int,
    query_lengths: Sequence[int] | None = None,
) -> ScoreInputs:
    """All tokens belong to slot 0, whose entries are the rows of `view` in order."""
    count = len(num_visible)
    return ScoreInputs(
        view=view,
        keys=one_page(width),
        slot_T=torch.zeros(count, dtype=torch.int32),
        num_visible_T=torch.tensor(num_visible, dtype=torch.int32),
        max_entries=width,
        query_lengths=tuple(query_lengths or [count]),
        request_slots_B=torch.zeros(count, dtype=torch.int32),
        tile_tokens=count,
    )


def one_page(entries: int, base: int = 0) -> PagedRows:
    block_table = torch.zeros(1, 1, dtype=torch.int32)
    return PagedRows(block_table=block_table, rows_per_page=max(1, entries), base=base)


def select_output(num_visible: Sequence[int], topk: int, entries: int) -> SelectOutput:
    """A poisoned stream, and the lane of every pick: a token's own ones, then all spare ones."""
    topk_width = min(topk, entries)
    sizes = [min(topk_width, n) for n in num_visible]
    indptr = torch.tensor([0, *sizes]).cumsum(0).int()
    spare = int(indptr[-1])
    lanes = []
    for token, used in enumerate(sizes):
        own = [int(indptr[token]) + k for k in range(used)]
        rest = list(range(spare, spare + topk_width - used))
        spare += topk_width - used
        lanes.append(own + rest)
    indices = torch.full((len(sizes) * topk_width,), POISON_INT, dtype=torch.int32)
    return SelectOutput(
        stream=IndexStream(indptr, indices, topk_width),
        scratch=torch.full(
            (select_scratch(len(sizes) * entries, len(sizes), topk),), POISON_INT, dtype=torch.int32
        ),
        lane_TK=torch.tensor(lanes, dtype=torch.int32).view(len(sizes), topk_width),
        rows=one_page(entries),
    )


def picks(output: SelectOutput) -> list[list[int]]:
    """The rows that select wrote for each token; every other lane must be -1."""
    ends = output.stream.indptr_T1.tolist()
    assert (output.stream.indices_N[ends[-1] :] == -1).all(), "spare lanes hold -1"
    return [output.stream.indices_N[a:b].tolist() for a, b in itertools.pairwise(ends)]


def best(scores: Sequence[float], num_visible: int, topk: int) -> list[int]:
    """The top-k visible entries, ascending: NaN counts as -inf, the lower entry wins a tie."""
    ranked = sorted(
        range(num_visible),
        key=lambda e: (math.inf if math.isnan(scores[e]) else -scores[e], e),
    )
    return sorted(ranked[:topk])
