"""Store: norm and rotate queries and KV, round the KV, scatter it; and the tail store of a chunk.

Legend: T tokens, H heads, D head dim, C channels of a fused projection.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.case import Case, Setup, kv_rounding, largest_error, mean_error
from dsv4.bench.peers import batch_size
from dsv4.bench.tables import normed64, random_rope, random_table, rotated64, shuffled_rows
from dsv4.config import ModelConfig
from dsv4.kernels.store_ref import rounded
from dsv4.metadata.plans import RopeTable
from dsv4.pool.base import KVView
from dsv4.pool.formats import row_format

TABLE_ROWS, SMALL_TABLE_ROWS = 1 << 20, 512
CHUNK, SMALL_CHUNK = 4096, 24
BYTES_BUDGET = 8 << 30
TOLERANCE = 1.5e-2
"""bf16 queries: half a step is 2^-9 of a value. Rounded rows: a few values lie one step of their format off."""


@frozen(kw_only=True, eq=False)
class _Inputs:
    projected_TC: Tensor
    """Queries, then channels of another op."""
    latent_TC: Tensor
    """Channels of another op, then KV."""
    kv_norm: Tensor
    rope: RopeTable
    loc_T: Tensor
    fresh_TD: Tensor | None

    def q_THD(self, model: ModelConfig) -> Tensor:
        heads, dim = model.num_attention_heads, model.head_dim
        return self.projected_TC[:, : heads * dim].view(-1, heads, dim)

    def kv_TD(self, model: ModelConfig) -> Tensor:
        return self.latent_TC[:, -model.head_dim :]


def cases(setup: Setup) -> Iterator[Case]:
    """Decode in place, a chunk into fresh rows, and the chunk's tail."""
    chunk = SMALL_CHUNK if setup.small else CHUNK
    table_rows = SMALL_TABLE_ROWS if setup.small else TABLE_ROWS
    for name, model in setup.models.items():
        view = random_table(row_format(setup.row_format, model), table_rows, setup.device)
        order = shuffled_rows(view.num_rows, setup.device)
        for batch in setup.batches:
            size = batch_size(batch)
            yield _case(setup, model, view, order, f"{name}-decode", size, batch, chunked=False)
        size = f"{chunk:,} tokens"
        yield _case(setup, model, view, order, f"{name}-chunk", size, chunk, chunked=True)
        yield _tail_case(setup, model, view, f"{name}-tail", size, chunk)


def _case(
    setup: Setup, model: ModelConfig, view: KVView, order: Tensor, name: str, size: str, tokens: int, *, chunked: bool
) -> Case:  # fmt: skip
    nbytes = _bytes(model, view, tokens, chunked=chunked)
    num_calls = setup.num_calls(int(2 * nbytes), BYTES_BUDGET)
    num_calls = max(1, min(num_calls, view.num_rows // tokens))
    inputs = [
        _inputs(setup, model, view, order[i * tokens : (i + 1) * tokens], chunked=chunked)
        for i in range(num_calls)
    ]

    def run(one: _Inputs) -> Tensor:
        return setup.kernels.store.store(
            one.q_THD(model), one.kv_TD(model), kv_norm=one.kv_norm, eps=model.rms_norm_eps,
            rope=one.rope, store_loc_T=one.loc_T, view=view, rounding=kv_rounding(model),
            fresh_TD=one.fresh_TD,
        )  # fmt: skip

    def check() -> float:
        one = inputs[0]
        q_THD, kv_TD = one.q_THD(model).clone(), one.kv_TD(model).clone()
        if one.fresh_TD is not None:
            one.fresh_TD.fill_(torch.nan)
        queries = run(one)
        return _error(model, view, one, (q_THD, kv_TD), queries)

    return Case(
        name=name,
        size=size,
        calls=[functools.partial(run, one) for one in inputs],
        check=check,
        tolerance=TOLERANCE,
        nbytes=nbytes,
    )


def _inputs(
    setup: Setup, model: ModelConfig, view: KVView, rows_T: Tensor, *, chunked: bool
) -> _Inputs:
    tokens, device = rows_T.shape[0], setup.device
    own = model.num_attention_heads * model.head_dim
    dtype = torch.float32 if setup.row_format == "fp32" else torch.bfloat16
    fresh = torch.empty(tokens, model.head_dim, dtype=view.format.value_dtype, device=device)
    index = model.index_n_heads * model.index_head_dim
    return _Inputs(
        projected_TC=setup.randn(tokens, own + index, dtype=dtype),
        latent_TC=setup.randn(tokens, model.q_lora_rank + model.head_dim, dtype=dtype),
        kv_norm=setup.randn(model.head_dim, dtype=torch.float32).abs() + 0.5,
        rope=random_rope(tokens, model.qk_rope_head_dim, device),
        # A chunk's rows are stored behind attention, by the tail store.
        loc_T=torch.full_like(rows_T, -1) if chunked else rows_T,
        fresh_TD=fresh if chunked else None,
    )


def _bytes(model: ModelConfig, view: KVView, tokens: int, *, chunked: bool) -> float:
    """Queries read and written, KV read, angles, and the stored or the fresh rows."""
    width = 4 if view.format.value_dtype == torch.float32 else 2
    queries = 2.0 * model.num_attention_heads * model.head_dim * width
    row = model.head_dim * width if chunked else view.format.nbytes(view.num_rows) / view.num_rows
    kv_and_angles = model.head_dim * width + 4 * model.qk_rope_head_dim + 4
    return tokens * (queries + kv_and_angles + row)


def _error(
    model: ModelConfig, view: KVView, one: _Inputs, raw: Sequence[Tensor], queries: Tensor
) -> float:
    q_THD, kv_TD = raw
    eps, worst = model.rms_norm_eps, 0.0
    for first in range(
        0, q_THD.shape[0], 256
    ):  # float64 of all queries of a chunk would take 1 GB a copy
        run = slice(first, first + 256)
        rope = RopeTable(one.rope.cos_TP[run], one.rope.sin_TP[run])
        wanted = rotated64(normed64(q_THD[run], eps), rope)
        worst = max(worst, largest_error(queries[run], wanted))
    kv = rotated64(normed64(kv_TD, eps) * one.kv_norm.double(), one.rope).float()
    value_dtype = view.format.value_dtype
    kv = rounded(kv, kv_rounding(model), rope_dim=model.qk_rope_head_dim, value_dtype=value_dtype)
    found = view.read(one.loc_T) if one.fresh_TD is None else one.fresh_TD
    return max(worst, mean_error(found, view.format.round(kv)))


def _tail_case(
    setup: Setup, model: ModelConfig, view: KVView, name: str, size: str, tokens: int
) -> Case:
    """Only the last window of a chunk reaches the ring."""
    stored = min(model.sliding_window, tokens)
    fresh = [
        setup.randn(tokens, model.head_dim, dtype=view.format.value_dtype)
        for _ in range(setup.num_calls(stored, view.num_rows))
    ]
    loc = torch.full((len(fresh), tokens), -1, dtype=torch.int32, device=setup.device)
    loc[:, -stored:] = shuffled_rows(view.num_rows, setup.device)[: loc.shape[0] * stored].view(
        -1, stored
    )

    def run(call: int) -> None:
        setup.kernels.store.store_tail(fresh[call], tail_loc_T=loc[call], view=view)

    def check() -> float:
        run(0)
        # The rows hold what the table's format makes of the fresh ones.
        return mean_error(view.read(loc[0, -stored:]), view.format.round(fresh[0][-stored:]))

    row_bytes = view.format.nbytes(view.num_rows) / view.num_rows
    width = fresh[0].element_size()
    return Case(
        name=name,
        size=size,
        calls=[functools.partial(run, call) for call in range(len(fresh))],
        check=check,
        tolerance=0.0,
        nbytes=4.0 * tokens + stored * (row_bytes + model.head_dim * width),
    )
