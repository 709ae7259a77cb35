"""Compress: pool closing windows, norm, rotate, round, scatter, and keep the state of open windows.

Legend: T tokens, C projected channels, D entry channels, E closing windows, M pooled tokens, S fold segments, J steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import attrs
import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.case import Case, Setup, index_rounding, kv_rounding, mean_error
from dsv4.bench.forwards import BareForward
from dsv4.bench.peers import batch_size
from dsv4.bench.shapes import ratio_of
from dsv4.bench.tables import normed64, random_table, rotated64
from dsv4.config import LayerKind, ModelConfig
from dsv4.kernels.base import Rounding
from dsv4.kernels.compress_ref import add_position_bias, gather_raw
from dsv4.kernels.store_ref import rounded
from dsv4.metadata.fill import TorchFill
from dsv4.metadata.plans import CompressorTarget, FoldPlan, OverlapPlan, PlanKey
from dsv4.pool.base import KVView
from dsv4.pool.formats import RowFormat, index_format, row_format
from dsv4.pool.rows import PlainRows

CHUNK, SMALL_CHUNK = 4096, 40
CONTEXT, SMALL_CONTEXT = 8192, 192
MAX_CALLS = 32
BYTES_BUDGET = 8 << 30
TOLERANCE = 2e-2
"""Of rounded entries: a few values lie one step of their format off."""


@frozen(kw_only=True, eq=False)
class _Compressor:
    """One compressor of one layer."""

    name: str
    kind: LayerKind
    dim: int
    row_format: RowFormat
    rounding: Rounding
    norm: Tensor
    ape_MC: Tensor

    @property
    def ratio(self) -> int:
        return self.ape_MC.shape[0]

    @property
    def is_indexer(self) -> bool:
        return self.name.endswith("indexer")

    @property
    def channels(self) -> int:
        """Of the projection: kv and gate, in CSA an A and a B half of each."""
        return self.dim * (4 if self.kind is LayerKind.CSA else 2)


@frozen(kw_only=True, eq=False)
class _Inputs:
    projected_TC: Tensor
    plan: OverlapPlan | FoldPlan
    target: CompressorTarget
    nbytes: float


def cases(setup: Setup) -> Iterator[Case]:
    """CSA's main compressor and its indexer's, and HCA's; decode batches and one chunk."""
    chunk = SMALL_CHUNK if setup.small else CHUNK
    context = SMALL_CONTEXT if setup.small else CONTEXT
    name, model = next(iter(setup.models.items()))
    for compressor in _compressors(setup, model, name):
        for batch in setup.batches:
            # The first closes its windows; of consecutive lengths as many as in a long run.
            lengths = [context // 2 - 1 + b for b in range(batch)]
            yield _case(setup, model, compressor, batch_size(batch), lengths, [1] * batch, context)
        size, lengths = f"{chunk:,} tokens", [context // 2]
        yield _case(setup, model, compressor, size, lengths, [chunk], context)


def _compressors(setup: Setup, model: ModelConfig, name: str) -> list[_Compressor]:
    rows, keys = row_format(setup.row_format, model), index_format(setup.index_format, model)
    kv, key = kv_rounding(model), index_rounding(model)
    found = []
    for part, kind, dim, format_, rounding in (
        ("csa", LayerKind.CSA, model.head_dim, rows, kv),
        ("indexer", LayerKind.CSA, model.index_head_dim, keys, key),
        ("hca", LayerKind.HCA, model.head_dim, rows, kv),
    ):
        halves = 2 if kind is LayerKind.CSA else 1
        ape = setup.randn(ratio_of(model, kind), halves * dim, dtype=torch.float32)
        norm = setup.randn(dim, dtype=torch.float32).abs() + 0.5
        found.append(
            _Compressor(
                name=f"{name}-{part}", kind=kind, dim=dim, row_format=format_, rounding=rounding, norm=norm, ape_MC=ape
            )
        )  # fmt: skip
    return found


def _case(
    setup: Setup,
    model: ModelConfig,
    compressor: _Compressor,
    size: str,
    lengths: Sequence[int],
    query_lengths: Sequence[int],
    context: int,
) -> Case:
    per_call = 8 * sum(query_lengths) * compressor.channels
    num_calls = min(setup.num_calls(per_call, BYTES_BUDGET), MAX_CALLS)
    forwards = [
        BareForward.of(model, lengths, query_lengths, setup.device, max_context=context)
        for _ in range(num_calls)
    ]
    # One table for all calls: entries are only written.
    rows = forwards[0].geometry.entry_base + forwards[0].geometry.entry_rows(compressor.ratio)
    view = random_table(compressor.row_format, rows, setup.device)
    inputs = [_inputs(setup, compressor, forward, view, lengths) for forward in forwards]

    def run(one: _Inputs) -> None:
        common = {
            "ape_MC": compressor.ape_MC, "norm": compressor.norm, "eps": model.rms_norm_eps,
            "target": one.target, "rounding": compressor.rounding,
        }  # fmt: skip
        if isinstance(one.plan, FoldPlan):
            setup.kernels.compress.fold(one.projected_TC, plan=one.plan, **common)  # type: ignore[arg-type]
        else:
            setup.kernels.compress.overlap(one.projected_TC, plan=one.plan, **common)  # type: ignore[arg-type]

    def check() -> float:
        one = inputs[0]
        wanted = _entries64(compressor, one, model.rms_norm_eps)
        run(one)
        return _error(model, compressor, one, wanted)

    return Case(
        name=compressor.name,
        size=size,
        calls=[functools.partial(run, one) for one in inputs],
        check=check,
        tolerance=TOLERANCE,
        nbytes=inputs[0].nbytes,
    )


def _inputs(
    setup: Setup,
    compressor: _Compressor,
    forward: BareForward,
    entry_view: KVView,
    lengths: Sequence[int],
) -> _Inputs:
    shared, geometry, ratio = forward.fill(TorchFill), forward.geometry, compressor.ratio
    folds, query_lengths = compressor.kind is LayerKind.HCA, forward.shape.query_lengths
    state_rows = geometry.in_place_tokens if folds else geometry.overlap_rows(ratio)
    locs = shared.index_locs if compressor.is_indexer else shared.entry_locs
    state = PlainRows(torch.float32, compressor.channels)
    target = CompressorTarget(
        state_view=random_table(state, len(lengths) * state_rows, setup.device),
        entry_view=entry_view,
        entry_loc_E=locs[ratio],
        pooled_EC=torch.empty(locs[ratio].shape[0], compressor.dim, device=setup.device),
        accumulator_view=_accumulators(setup, compressor.dim, lengths) if folds else None,
    )
    return _Inputs(
        projected_TC=setup.randn(
            forward.shape.num_tokens, compressor.channels, dtype=torch.float32
        ),
        plan=_repeatable(shared.state_plans[PlanKey(compressor.kind, ratio)], len(lengths)),
        target=target,
        nbytes=_bytes(compressor, target, lengths, query_lengths, state_rows),
    )


def _repeatable(plan: OverlapPlan | FoldPlan, num_requests: int) -> OverlapPlan | FoldPlan:
    """Advanced accumulators go to rows behind those that are read: every replay finds the counts of the first."""
    if not isinstance(plan, FoldPlan):
        return plan
    loc_B = plan.accumulator_loc_B
    return attrs.evolve(plan, accumulator_loc_B=torch.where(loc_B >= 0, loc_B + num_requests, -1))


def _accumulators(setup: Setup, dim: int, lengths: Sequence[int]) -> KVView:
    """Each has folded all tokens but the last, which is a raw row yet; behind them room for the advanced ones."""
    view = random_table(PlainRows(torch.float32, 3 * dim + 1), 2 * len(lengths), setup.device)
    view.storage[:, dim : 2 * dim].abs_().add_(1.0)  # sums of weights
    counts = [max(length - 1, 0) for length in lengths]
    view.storage[:, -1] = setup.ints([*counts, *counts])
    return view


def _bytes(
    compressor: _Compressor,
    target: CompressorTarget,
    lengths: Sequence[int],
    query_lengths: Sequence[int],
    state_rows: int,
) -> float:
    """The projection once, state rows of windows that close and are older, entries and new state rows; of HCA the
    accumulator, read and written."""
    channel, ratio, total = 4.0 * compressor.channels, compressor.ratio, 0.0
    view = target.entry_view
    entry = view.format.nbytes(view.num_rows) / view.num_rows
    for length, num in zip(lengths, query_lengths, strict=True):
        closing = (length + num) // ratio - length // ratio
        total += num * channel + closing * entry + min(num, state_rows) * channel
        if compressor.kind is LayerKind.HCA:
            total += 2 * 4.0 * (3 * compressor.dim + 1)
        elif closing:
            # A halves of the window before and B halves of what the open one has: half of each row.
            total += (ratio + length % ratio) * channel / 2
    return total


def _entries64(compressor: _Compressor, one: _Inputs, eps: float) -> Tensor:
    """Entries [E, D] in float64, normed and rotated; of lanes that close nothing too, whose rows are -1."""
    plan, dim = one.plan, compressor.dim
    own_TC = add_position_bias(one.projected_TC, compressor.ape_MC, plan.ape_row_T)
    if isinstance(plan, OverlapPlan):
        m = plan.ratio
        raw = gather_raw(one.target.state_view, own_TC, plan.source_EM).double()
        kv = torch.cat([raw[:, :m, :dim], raw[:, m:, dim : 2 * dim]], 1)
        gate = torch.cat([raw[:, :m, 2 * dim : 3 * dim], raw[:, m:, 3 * dim :]], 1)
        gate = gate.masked_fill((plan.source_EM < 0).unsqueeze(-1), -torch.inf)
        pooled = (gate.softmax(1) * kv).sum(1)
    else:
        pooled = _folded64(one, plan, own_TC)
    return rotated64(normed64(pooled, eps) * compressor.norm.double(), plan.entry_rope)


def _folded64(one: _Inputs, plan: FoldPlan, own_TC: Tensor) -> Tensor:
    """The accumulator, if it is of the segment's window, and the tokens that it lacks."""
    closing = one.target.entry_loc_E.shape[0]
    view = one.target.accumulator_view
    assert view is not None
    rows_E = plan.accumulator_row_S[:closing]
    old = view.read(rows_E.clamp(min=0)).double()
    folded_E = torch.where(rows_E >= 0, old[:, -1], 0.0)
    holds_E1 = (folded_E > plan.start_S[:closing]).unsqueeze(1)
    top, total, weighted = old[:, :-1].chunk(3, -1)
    raw = gather_raw(one.target.state_view, own_TC, plan.source_SJ[:closing]).double()
    kv, gate = raw.chunk(2, -1)
    skip = (plan.source_SJ[:closing] < 0) | (plan.position_SJ[:closing] < folded_E.unsqueeze(1))
    gate = gate.masked_fill(skip.unsqueeze(-1), -torch.inf)
    top = torch.where(holds_E1, top, -torch.inf)
    highest = torch.maximum(top, gate.amax(1))
    carried, weights = (top - highest).exp(), (gate - highest.unsqueeze(1)).exp()
    total = torch.where(holds_E1, total, 0.0) * carried + weights.sum(1)
    weighted = torch.where(holds_E1, weighted, 0.0) * carried + (weights * kv).sum(1)
    return weighted / total


def _error(model: ModelConfig, compressor: _Compressor, one: _Inputs, wanted_ED: Tensor) -> float:
    view, loc_E = one.target.entry_view, one.target.entry_loc_E
    closes_E = (loc_E >= 0).nonzero().flatten()
    values = rounded(
        wanted_ED[closes_E].float(), compressor.rounding, rope_dim=model.qk_rope_head_dim,
        value_dtype=view.format.value_dtype,
    )  # fmt: skip
    return mean_error(view.read(loc_E[closes_E]), view.format.round(values))
