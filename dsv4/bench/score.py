"""The indexer's scores: every visible key of a request against 64 heads of its token; and the queries themselves.

Legend: T tokens, H index heads, D index head dim, N keys, B requests, P pages of a request.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.case import Case, Setup, index_rounding, largest_error
from dsv4.bench.shapes import PAGE_ENTRIES
from dsv4.bench.tables import random_rope, random_table
from dsv4.config import ModelConfig
from dsv4.kernels.score_ref import TorchScore
from dsv4.metadata.plans import RopeTable, ScoreInputs
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, index_format
from dsv4.pool.geometry import PagedRows
from dsv4.quant import decode_fp8

BYTES_BUDGET = 4 << 30
"""Keys and scores of all calls of a case."""
CHECKED_VALUES = 1 << 27
TOLERANCE = 2e-3
"""fp8 products accumulate with fewer bits than fp32."""


@frozen(kw_only=True)
class Shape:
    """Requests with one token each and their keys, or one request with many tokens."""

    size: str
    keys: tuple[int, ...]
    tokens: int = 1
    """Of each request."""
    causal: bool = False
    """Token t sees its share of the keys, (t + 1) / tokens."""


SHAPES = (
    *(
        Shape(size=f"{batch} x {keys:,}", keys=(keys,) * batch)
        for batch, keys in (
            (1, 2048), (64, 2048), (1, 32_768), (64, 32_768), (256, 32_768), (1, 262_144), (8, 262_144),
        )
    ),
    Shape(size="64 x ragged to 65,536", keys=tuple(1024 * i for i in range(1, 65))),
    Shape(size="prefill 4,096 x 32,768", keys=(32_768,), tokens=4096),
    Shape(size="causal prefill 4,096 x 32,768", keys=(32_768,), tokens=4096, causal=True),
)  # fmt: skip
SMALL_SHAPES = (
    Shape(size="3 x 130", keys=(130,) * 3),
    Shape(size="3 x ragged to 192", keys=(1, 70, 192)),
    Shape(size="causal prefill 9 x 70", keys=(70,), tokens=9, causal=True),
)


@frozen(kw_only=True, eq=False)
class _Inputs:
    q_THD: Tensor
    weights_TH: Tensor
    score: ScoreInputs
    out_TN: Tensor


def cases(setup: Setup) -> Iterator[Case]:
    """Flash's indexer (Pro's is the same), then its queries."""
    model = next(iter(setup.models.values()))
    view = random_table(index_format(setup.index_format, model), _table_rows(setup), setup.device)
    for shape in SMALL_SHAPES if setup.small else SHAPES:
        yield _case(setup, model, view, shape)
    for tokens in (3, 9) if setup.small else (64, 4096):
        yield _queries_case(setup, model, view, tokens)


def _pages(shape: Shape) -> list[int]:
    return [-(-keys // PAGE_ENTRIES) for keys in shape.keys]


def _num_calls(setup: Setup, shape: Shape) -> int:
    key_bytes = 132 * PAGE_ENTRIES * sum(_pages(shape))
    score_bytes = 4 * shape.tokens * len(shape.keys) * max(shape.keys)
    return setup.num_calls(key_bytes + score_bytes, BYTES_BUDGET)


def _table_rows(setup: Setup) -> int:
    shapes = SMALL_SHAPES if setup.small else SHAPES
    return max(PAGE_ENTRIES * sum(_pages(s)) * _num_calls(setup, s) for s in shapes)


def _case(setup: Setup, model: ModelConfig, view: KVView, shape: Shape) -> Case:
    pages = torch.randperm(view.num_rows // PAGE_ENTRIES, device=setup.device).int()
    num_calls, per_call = _num_calls(setup, shape), sum(_pages(shape))
    inputs = [
        _inputs(setup, model, view, shape, pages[i * per_call : (i + 1) * per_call])
        for i in range(num_calls)
    ]

    def run(one: _Inputs) -> None:
        setup.kernels.score.score(
            one.q_THD, one.weights_TH, one.score, first_token=0, out_TN=one.out_TN
        )

    def check() -> float:
        inputs[0].out_TN.fill_(torch.nan)
        run(inputs[0])
        return _error(setup, model, inputs[0])

    heads, dim = model.index_n_heads, model.index_head_dim
    seen = sum(_visible(shape))
    key_bytes = sum(shape.keys) * view.format.nbytes(view.num_rows) / view.num_rows
    query_bytes = len(shape.keys) * shape.tokens * heads * (dim * 2 + 4)
    return Case(
        name="flash",
        size=shape.size,
        calls=[functools.partial(run, one) for one in inputs],
        check=check,
        tolerance=TOLERANCE,
        nbytes=key_bytes + query_bytes + 4.0 * seen,
        flop=2.0 * heads * dim * seen,
        fp8=isinstance(view.format, IndexFp8Rows | IndexFp4Rows),
    )


def _visible(shape: Shape) -> list[int]:
    """Keys that each token sees."""
    if not shape.causal:
        return [keys for keys in shape.keys for _ in range(shape.tokens)]
    return [keys * (t + 1) // shape.tokens for keys in shape.keys for t in range(shape.tokens)]


def _inputs(setup: Setup, model: ModelConfig, view: KVView, shape: Shape, pages: Tensor) -> _Inputs:
    num_requests, device = len(shape.keys), setup.device
    num_tokens = num_requests * shape.tokens
    counts = _pages(shape)
    block_table_BP = torch.full((num_requests, max(counts)), -1, dtype=torch.int32, device=device)
    first = 0
    for request, count in enumerate(counts):
        block_table_BP[request, :count] = pages[first : first + count]
        first += count
    slots_B = torch.arange(num_requests, dtype=torch.int32, device=device)
    score = ScoreInputs(
        view=view,
        keys=PagedRows(block_table=block_table_BP, rows_per_page=PAGE_ENTRIES, base=0),
        slot_T=slots_B.repeat_interleave(shape.tokens),
        num_visible_T=setup.ints(_visible(shape)),
        max_entries=max(shape.keys),
        query_lengths=(shape.tokens,) * num_requests,
        request_slots_B=slots_B,
        tile_tokens=num_tokens,
    )
    raw_THD, raw_weights_TH, rope = _raw(setup, model, num_tokens)
    q_THD, weights_TH = _queries(setup, model, view, raw_THD, raw_weights_TH, rope)
    return _Inputs(
        q_THD=q_THD,
        weights_TH=weights_TH,
        score=score,
        out_TN=torch.empty(num_tokens, max(shape.keys), device=device),
    )


def _raw(setup: Setup, model: ModelConfig, num_tokens: int) -> tuple[Tensor, Tensor, RopeTable]:
    heads, dim = model.index_n_heads, model.index_head_dim
    return (
        setup.randn(num_tokens, heads, dim),
        setup.randn(num_tokens, heads, dtype=torch.float32),
        random_rope(num_tokens, model.qk_rope_head_dim, setup.device),
    )


def _queries(
    setup: Setup, model: ModelConfig, view: KVView, q_THD: Tensor, weights_TH: Tensor, rope: RopeTable
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return setup.kernels.score.queries(
        q_THD, weights_TH, rope=rope, rounding=index_rounding(model), scale=_scale(model), view=view
    )


def _scale(model: ModelConfig) -> float:
    return float(model.index_head_dim**-0.5 * model.index_n_heads**-0.5)


def _error(setup: Setup, model: ModelConfig, one: _Inputs) -> float:
    """Against float64 on the queries that the scorer reads (they have a case of their own: one code that falls on the
    other side of a rounding border would hide every other error); keys past n_vis must be -inf."""
    q_THD, weights_TH = one.q_THD, one.weights_TH
    if q_THD.element_size() == 1:
        q_THD = decode_fp8(q_THD)
    tokens_of, worst, entry_N = one.score.query_lengths[0], 0.0, torch.arange(
        one.score.max_entries, dtype=torch.int32, device=setup.device
    )  # fmt: skip
    step = max(1, CHECKED_VALUES // (model.index_n_heads * one.score.max_entries))
    for request in range(len(one.score.query_lengths)):
        rows_N = one.score.keys.rows(one.score.request_slots_B[request], entry_N).clamp_(min=0)
        keys_ND = one.score.view.read(rows_N).double()
        for first in range(request * tokens_of, (request + 1) * tokens_of, step):
            run = slice(first, min(first + step, (request + 1) * tokens_of))
            dots_THN = (q_THD[run].double() @ keys_ND.t()).relu_()
            wanted_TN = (weights_TH[run].double().unsqueeze(1) @ dots_THN).squeeze(1)
            hidden_TN = entry_N >= one.score.num_visible_T[run].unsqueeze(1)
            actual_TN = one.out_TN[run]
            if not bool((actual_TN[hidden_TN] == -torch.inf).all()):
                return float("inf")
            worst = max(
                worst,
                largest_error(
                    actual_TN.masked_fill(hidden_TN, 0), wanted_TN.masked_fill_(hidden_TN, 0)
                ),
            )
    return worst


def _queries_case(setup: Setup, model: ModelConfig, view: KVView, num_tokens: int) -> Case:
    raw = [_raw(setup, model, num_tokens) for _ in range(min(setup.max_calls, 32))]
    q_THD, weights_TH, rope = raw[0]
    first_q_THD, first_weights_TH = q_THD.clone(), weights_TH.clone()

    def run(inputs: Sequence[object]) -> object:
        q_THD, weights_TH, rope = inputs
        return _queries(setup, model, view, q_THD, weights_TH, rope)  # type: ignore[arg-type]

    def check() -> float:
        wanted, actual = (
            kernel.queries(
                first_q_THD.clone(), first_weights_TH.clone(), rope=rope,
                rounding=index_rounding(model), scale=_scale(model), view=view,
            )
            for kernel in (TorchScore(), setup.kernels.score)
        )  # fmt: skip
        # The forms may differ (codes with their scale in the weight): what they have in common is their products.
        products = [_products(*found) for found in (actual, wanted)]
        return largest_error(*products)

    values = num_tokens * model.index_n_heads * model.index_head_dim
    return Case(
        name="flash-queries",
        size=f"{num_tokens:,} tokens",
        calls=[functools.partial(run, one) for one in raw],
        check=check,
        tolerance=0.05,  # a value on a border of its four bits may fall on either side
        nbytes=4.0 * values,
    )


def _products(q_THD: Tensor, weights_TH: Tensor) -> Tensor:
    """[T] sums over heads and channels of weight times query."""
    return (q_THD.double().sum(-1) * weights_TH.double()).sum(-1)
