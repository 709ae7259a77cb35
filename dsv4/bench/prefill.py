"""Attention of a prefill chunk in a CSA layer: neighbouring tokens share most of their windows.

`context`: the selected rows lie among the entries of one request, which fit an L2 cache. `scattered`: anywhere in a
table of 4 GB. Legend: T tokens, K rows a token reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.bench.attend import (
    SMALL_TABLE_ROWS,
    TABLE_ROWS,
    attend_bytes,
    attend_case,
    attend_inputs,
    workspace,
)
from dsv4.bench.case import Case, Setup
from dsv4.bench.tables import random_table
from dsv4.config import ModelConfig
from dsv4.pool.formats import row_format

TOKENS, SMALL_TOKENS = 4096, 24
CONTEXT_ENTRIES, SMALL_CONTEXT_ENTRIES = 32_768, 96
"""128K tokens of one request."""
NUM_CALLS = 2


def cases(setup: Setup) -> Iterator[Case]:
    """flash and pro, entries of one request and scattered ones."""
    tokens = SMALL_TOKENS if setup.small else TOKENS
    context = SMALL_CONTEXT_ENTRIES if setup.small else CONTEXT_ENTRIES
    table_rows = SMALL_TABLE_ROWS if setup.small else TABLE_ROWS
    for name, model in setup.models.items():
        view = random_table(row_format(setup.row_format, model), table_rows, setup.device)
        window, topk = model.sliding_window, _topk(model)
        window_rows = tokens + window
        space = workspace(setup, model, tokens=tokens, requests=1)
        for kind, pool_rows in (("context", context), ("scattered", view.num_rows - window_rows)):
            lists = [
                (
                    _windows(tokens, window, setup.device),
                    window_rows + _distinct(tokens, topk, pool_rows, setup.device),
                )
                for _ in range(NUM_CALLS)
            ]
            inputs = [attend_inputs(setup, model, view, *pair) for pair in lists]
            distinct = sum(torch.unique(rows).numel() for rows in lists[0])
            nbytes = attend_bytes(model, view, tokens, window + topk, distinct)
            size = f"{tokens:,} tokens"
            yield attend_case(setup, model, inputs, space, f"{name}-{kind}", size, nbytes=nbytes)


def _topk(model: ModelConfig) -> int:
    return next(layer.index_topk for layer in model.layers if layer.index_topk)


def _windows(tokens: int, window: int, device: torch.device) -> Tensor:
    """Token t reads the rows t .. t + window - 1."""
    first_T1 = torch.arange(tokens, dtype=torch.int32, device=device)[:, None]
    return first_T1 + torch.arange(window, dtype=torch.int32, device=device)


def _distinct(tokens: int, width: int, num_rows: int, device: torch.device) -> Tensor:
    """int32 [tokens, width] ascending rows below num_rows, no two of a token equal: one of each `width`-th part."""
    part = num_rows // width
    offset_TK = torch.randint(part, (tokens, width), dtype=torch.int32, device=device)
    return offset_TK + part * torch.arange(width, dtype=torch.int32, device=device)
