"""Attention of decode steps: one query token a request, rows scattered over a table.

Legend: T tokens, H heads, D head dim, K rows a token reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.case import Case, Setup, largest_error
from dsv4.bench.peers import batch_size
from dsv4.bench.tables import random_table, shuffled_rows, stream_of
from dsv4.config import ModelConfig
from dsv4.metadata.batch import BatchShape
from dsv4.metadata.buffers import Buffers, workspace_specs
from dsv4.metadata.plans import Source, Workspace
from dsv4.pool.base import KVView
from dsv4.pool.formats import row_format

TABLE_ROWS, SMALL_TABLE_ROWS = 4_000_000, 1024
CHECKED_VALUES = 1 << 26
"""float64 values that the check gathers at a time: half a GB."""
BF16_TOLERANCE, FP32_TOLERANCE = 1e-2, 1e-4


@frozen(eq=False)
class AttendInputs:
    """One call: queries, lists of rows, and the output that they belong to."""

    q_THD: Tensor
    sources: Sequence[Source]
    sink_H: Tensor
    out_THD: Tensor
    scale: float

    def run(self, setup: Setup, workspace: Workspace) -> None:
        setup.kernels.attend.attend(
            self.q_THD, self.sources, self.sink_H, scale=self.scale, out_THD=self.out_THD,
            workspace=workspace,
        )  # fmt: skip

    def error(self) -> float:
        """Of the output against float64 on the rows that the sources name."""
        rows_TK = torch.cat(
            [s.stream.indices_N.view(self.q_THD.shape[0], -1) for s in self.sources], dim=1
        )
        view, worst = self.sources[0].view, 0.0
        step = max(1, CHECKED_VALUES // (rows_TK.shape[1] * self.q_THD.shape[2]))
        for first in range(0, rows_TK.shape[0], step):
            tokens = slice(first, first + step)
            kv_TKD = view.read(rows_TK[tokens]).double()
            scores_THK = self.q_THD[tokens].double() @ kv_TKD.transpose(1, 2) * self.scale
            sink_TH1 = self.sink_H.double().expand(scores_THK.shape[0], -1).unsqueeze(-1)
            weights_THK = torch.cat([scores_THK, sink_TH1], -1).softmax(-1)[..., :-1]
            worst = max(worst, largest_error(self.out_THD[tokens], weights_THK @ kv_TKD))
        return worst


def contexts(model: ModelConfig, *, small: bool) -> dict[str, int]:
    """Entries that a token reads beside its window, by kind of layer and context."""
    topk = next(layer.index_topk for layer in model.layers if layer.index_topk)
    if small:
        return {"swa": 0, "csa": topk, "hca8k": 4, "hca128k": 40}
    return {"swa": 0, "csa": topk, "hca8k": 8192 // 128, "hca128k": 131_072 // 128}


def cases(setup: Setup) -> Iterator[Case]:
    """flash and pro; sliding, CSA, HCA at 8K and at 128K of context; every batch."""
    for name, model in setup.models.items():
        format_ = row_format(setup.row_format, model)
        table_rows = SMALL_TABLE_ROWS if setup.small else TABLE_ROWS
        view = random_table(format_, table_rows, setup.device)
        order = shuffled_rows(view.num_rows, setup.device)
        for kind, entries in contexts(model, small=setup.small).items():
            for batch in setup.batches:
                yield _case(setup, model, view, order, f"{name}-{kind}", entries, batch)


def _case(
    setup: Setup,
    model: ModelConfig,
    view: KVView,
    order: Tensor,
    name: str,
    entries: int,
    batch: int,
) -> Case:
    rows = model.sliding_window + entries
    num_calls = setup.num_calls(batch * rows, view.num_rows)
    # A list may not be longer than the table where the table is small.
    taken = order.repeat(-(-num_calls * batch * rows // order.shape[0]))
    lists = taken[: num_calls * batch * rows].view(num_calls, batch, rows)
    inputs = [
        attend_inputs(setup, model, view, rows_TK[:, : model.sliding_window], rows_TK[:, model.sliding_window :])
        for rows_TK in lists
    ]  # fmt: skip
    space = workspace(setup, model, tokens=batch, requests=batch)
    return attend_case(
        setup, model, inputs, space, name, batch_size(batch),
        nbytes=attend_bytes(model, view, batch, rows, batch * rows),
    )  # fmt: skip


def attend_inputs(
    setup: Setup, model: ModelConfig, view: KVView, window_TK: Tensor, entries_TK: Tensor
) -> AttendInputs:
    """Random queries over window rows and, where there are any, entries of one table."""
    shape = (window_TK.shape[0], model.num_attention_heads, model.head_dim)
    sources = [Source(view, stream_of(lists)) for lists in (window_TK, entries_TK) if lists.numel()]
    dtype = torch.float32 if setup.row_format == "fp32" else torch.bfloat16
    return AttendInputs(
        q_THD=setup.randn(*shape, dtype=dtype),
        sources=sources,
        sink_H=setup.randn(shape[1], dtype=torch.float32),
        out_THD=torch.full(shape, torch.nan, dtype=dtype, device=setup.device),
        scale=model.softmax_scale,
    )


def attend_case(
    setup: Setup,
    model: ModelConfig,
    inputs: Sequence[AttendInputs],
    space: Workspace,
    name: str,
    size: str,
    *,
    nbytes: float,
) -> Case:
    def check() -> float:
        inputs[0].out_THD.fill_(torch.nan)
        inputs[0].run(setup, space)
        return inputs[0].error()

    rows = sum(source.stream.max_rows for source in inputs[0].sources)
    tokens, heads, dim = inputs[0].q_THD.shape
    return Case(
        name=name,
        size=size,
        calls=[functools.partial(one.run, setup, space) for one in inputs],
        check=check,
        tolerance=FP32_TOLERANCE if setup.row_format == "fp32" else BF16_TOLERANCE,
        nbytes=nbytes,
        flop=4.0 * heads * rows * dim * tokens,
    )


def attend_bytes(
    model: ModelConfig, view: KVView, tokens: int, rows: int, distinct_rows: int
) -> float:
    """Each distinct row once, each index, queries and output."""
    heads, dim = model.num_attention_heads, model.head_dim
    width = 4 if view.format.value_dtype == torch.float32 else 2
    row_bytes = view.format.nbytes(view.num_rows) / view.num_rows
    return distinct_rows * row_bytes + tokens * (4.0 * rows + 2 * heads * dim * width)


def workspace(setup: Setup, model: ModelConfig, *, tokens: int, requests: int) -> Workspace:
    """As a builder of this capacity allocates it; no fresh rows and no scores."""
    shape = BatchShape(
        num_tokens=tokens, num_requests=requests, max_query_tokens=tokens // requests, max_length=1
    )
    specs = workspace_specs(model, shape, 4, torch.bfloat16)
    scratch = Buffers(specs, setup.device).tensors
    return Workspace(
        fresh_TD=None,
        scores=scratch["scores"],
        pooled=scratch["pooled"],
        select=scratch["select"],
        partials=scratch["partials"],
    )
