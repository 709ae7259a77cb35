"""The Triton indexer against float64 sums over the keys that each token sees, and the quantiser for its queries.

Legend: T tokens, H index heads, D index dim, N entries, P half the rope width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.kernels import score_triton
from dsv4.kernels.base import Rounding
from dsv4.kernels.score_ref import TorchScore
from dsv4.kernels.score_triton import TritonScore
from dsv4.metadata.plans import RopeTable, ScoreInputs
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, PlainRows, RowFormat
from dsv4.pool.geometry import PagedRows
from dsv4.quant import dequantize_fp8, hadamard, quantize_fp8, round_fp4
from dsv4.testing.memory import guarded, guarded_view, poisoned, same_bytes

FORMATS: dict[str, Callable[[int, int], RowFormat]] = {
    "fp32": lambda dim, planes: PlainRows(torch.float32, dim),
    "bf16": lambda dim, planes: PlainRows(torch.bfloat16, dim),
    "fp8": lambda dim, planes: IndexFp8Rows(dim, planes),
    "fp4": lambda dim, planes: IndexFp4Rows(dim, planes),
}
BAD_PAGES = (-1, -(2**31), 2**31 - 1, 10_000_000)
few = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@frozen(kw_only=True)
class Table:
    """A paged table of keys; pages are dealt out in a shuffled order, some are nobody's and stay poison."""

    name: str = "fp32"
    dim: int = 16
    rows_per_page: int = 3
    plane_rows: int = 64
    base: int = 0
    pages_per_slot: int = 4
    spare_columns: int = 64


@frozen(kw_only=True)
class Batch:
    """Requests (slot, visible entries of each token) in order; slot -1 is padding."""

    requests: tuple[tuple[int, tuple[int, ...]], ...]
    max_entries: int
    heads: int = 4

    @property
    def num_tokens(self) -> int:
        return sum(len(visible) for _, visible in self.requests)


SLOTS = 3


@st.composite
def tables(draw: st.DrawFn) -> Table:
    per_page = draw(st.sampled_from((1, 2, 3, 5, 16, 32, 64)))
    return Table(
        name=draw(st.sampled_from(tuple(FORMATS))),
        dim=draw(st.sampled_from((16, 32, 48, 80, 128))),
        rows_per_page=per_page,
        plane_rows=draw(st.sampled_from((1, 3, 64))),
        base=draw(st.sampled_from((0, 0, 7, 64))),
        pages_per_slot=draw(st.integers(1, max(2, 96 // per_page))),
        spare_columns=draw(st.sampled_from((0, 4, 64))),
    )


@st.composite
def batches(draw: st.DrawFn, table: Table) -> Batch:
    capacity = table.pages_per_slot * table.rows_per_page
    slots = draw(st.permutations((0, 1, 2, -1, -1)))[: draw(st.integers(1, 4))]
    counts = st.integers(0, capacity)
    requests = tuple(
        (slot, tuple(draw(st.lists(counts, min_size=0, max_size=3)))) for slot in slots
    )
    most = max((n for _, visible in requests for n in visible), default=0)
    return Batch(
        requests=requests,
        max_entries=most + draw(st.sampled_from((0, 1, 40))),
        heads=draw(st.sampled_from((1, 4, 5, 64))),
    )


@frozen(kw_only=True, eq=False)
class Case:
    inputs: ScoreInputs
    queries_THD: Tensor
    weights_TH: Tensor
    pages: list[list[int]]

    @classmethod
    def build(cls, table: Table, batch: Batch, device: torch.device, *, missing: int = 0) -> Case:
        generator = torch.Generator().manual_seed(7)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        num_pages = SLOTS * table.pages_per_slot + 2
        dealt = torch.randperm(num_pages, generator=generator)[: num_pages - 2].tolist()
        pages = [dealt[slot::SLOTS] for slot in range(SLOTS)]
        row_format = FORMATS[table.name](table.dim, table.plane_rows)
        num_rows = table.base + num_pages * table.rows_per_page
        spare = table.spare_columns // row_format.storage_dtype.itemsize
        memory = guarded_view(row_format, num_rows, device, spare_columns=spare)
        slots = [slot for slot, visible in batch.requests for _ in visible]
        visible = [n for _, visible in batch.requests for n in visible]
        rows = {
            table.base + pages[slot][entry // table.rows_per_page] * table.rows_per_page + entry % table.rows_per_page
            for slot, most in zip(slots, visible, strict=True) if slot >= 0 for entry in range(most)
        }  # fmt: skip
        if rows:
            written = torch.tensor(sorted(rows), dtype=torch.int32, device=device)
            memory.view.write(written, randn(len(rows), table.dim))
        for page, bad in zip(range(missing), BAD_PAGES, strict=False):
            pages[page % SLOTS][page // SLOTS] = bad

        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        inputs = ScoreInputs(
            view=memory.view,
            keys=PagedRows(
                block_table=ints(pages), rows_per_page=table.rows_per_page, base=table.base
            ),
            slot_T=ints(slots),
            num_visible_T=ints(visible),
            max_entries=batch.max_entries,
            query_lengths=tuple(len(visible) for _, visible in batch.requests),
            request_slots_B=ints([slot for slot, _ in batch.requests]),
            tile_tokens=max(len(slots), 1),
        )
        tokens = len(slots)
        wide = randn(tokens, batch.heads * table.dim + 8)
        return cls(
            inputs=inputs,
            queries_THD=wide[:, 8:].unflatten(1, (batch.heads, table.dim)),
            weights_TH=randn(tokens, batch.heads + 3)[:, 3:],
            pages=pages,
        )

    def prepared(self, kernel: TritonScore, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and weights as the kernel reads them, from copies behind the same strides."""
        tokens, _, dim = self.queries_THD.shape
        wide = torch.empty_like(self.queries_THD._base, dtype=dtype)
        q_THD = wide[:, 8:].unflatten(1, self.queries_THD.shape[1:])
        q_THD.copy_(self.queries_THD)
        rope = RopeTable(*(torch.zeros(tokens, dim // 4, device=wide.device) + x for x in (1, 0)))
        return kernel.queries(
            q_THD, self.weights_TH.clone(), rope=rope, rounding=Rounding.NONE, scale=1.0, view=self.inputs.view
        )  # fmt: skip

    def expected(self, dtype: torch.dtype) -> Tensor:
        """float64 [T, N], token by token."""
        q_THD = self.queries_THD.to(dtype)
        if isinstance(self.inputs.view.format, IndexFp8Rows):
            dim = q_THD.shape[-1]
            q_THD = dequantize_fp8(*quantize_fp8(q_THD.bfloat16(), dim), dim)
        keys, view = self.inputs.keys, self.inputs.view
        out_TN = torch.full((q_THD.shape[0], self.inputs.max_entries), -torch.inf).double()
        tokens = zip(self.inputs.slot_T.tolist(), self.inputs.num_visible_T.tolist(), strict=True)
        for t, (slot, visible) in enumerate(tokens):
            entries = range(min(visible, self.inputs.max_entries)) if slot >= 0 else ()
            rows = {}
            for entry in entries:
                page = self.pages[slot][entry // keys.rows_per_page]
                row = keys.base + page * keys.rows_per_page + entry % keys.rows_per_page
                if page >= 0 and row < view.num_rows:
                    rows[entry] = row
            if rows:
                index = torch.tensor(list(rows.values()), device=q_THD.device)
                dots_HN = q_THD[t].double() @ view.read(index).double().t()
                weights_H1 = self.weights_TH[t].double().unsqueeze(1)
                out_TN[t, list(rows)] = (weights_H1 * dots_HN.relu()).sum(0).cpu()
        return out_TN


def scores(kernel: TritonScore, case: Case, given: tuple[Tensor, Tensor], tile: int) -> Tensor:
    """All scores, tile by tile, into a matrix with guards around it; checks that the guards hold."""
    q_THD, weights_TH = given
    num_tokens, device = q_THD.shape[0], q_THD.device
    out = guarded([num_tokens, case.inputs.max_entries], torch.float32, device, spare_columns=3)
    for first in range(0, num_tokens, tile):
        own = slice(first, first + tile)
        kernel.score(
            q_THD[own], weights_TH[own], case.inputs, first_token=first, out_TN=out.inner[own]
        )
    assert out.intact(), "lanes beside the scores were written"
    return out.inner


def assert_close(actual_TN: Tensor, wanted_TN: Tensor, *, step: float = 3e-5) -> None:
    actual_TN = actual_TN.cpu().double()
    assert torch.equal(actual_TN == -torch.inf, wanted_TN == -torch.inf)
    shown = wanted_TN != -torch.inf
    size = wanted_TN[shown].abs().max() if bool(shown.any()) else 1.0
    error = (actual_TN - wanted_TN)[shown].abs()
    assert bool((error <= step * size).all()), f"error {error.max():.3g} of {size:.3g}"


def tolerance(name: str, device: torch.device) -> float:
    """Native fp8 products add up with fewer bits than fp32."""
    return 1e-3 if name == "fp8" and device.type == "cuda" else 3e-5


@few
@given(data=st.data())
def test_scores_are_the_sums_over_the_visible_keys(
    data: st.DataObject, device: torch.device
) -> None:
    table = data.draw(tables())
    batch = data.draw(batches(table))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    case = Case.build(table, batch, device)
    kernel = TritonScore(deterministic=data.draw(st.booleans()))
    tile = data.draw(st.integers(1, max(batch.num_tokens, 1)))
    actual_TN = scores(kernel, case, case.prepared(kernel, dtype), tile)
    assert_close(actual_TN, case.expected(dtype), step=tolerance(table.name, device))


@few
@given(data=st.data())
def test_any_tiling_gives_the_same_scores(data: st.DataObject, device: torch.device) -> None:
    """Tiles that are one run of rows, two runs, and a gather; chunks of several tiles; tokens of one slot and of
    several slots in one program."""
    table = evolve(
        data.draw(tables()), rows_per_page=data.draw(st.sampled_from((8, 16, 24, 32, 48)))
    )
    batch = data.draw(batches(table))
    case = Case.build(table, batch, device)
    kernel, block_n = TritonScore(), data.draw(st.sampled_from((16, 32, 64)))
    tokens, products = data.draw(st.sampled_from(((1, 1), (2, 1), (4, 1), (2, 2), (4, 2))))
    chosen = score_triton._config

    def config(**facts: Any) -> score_triton.Config:
        return evolve(chosen(**facts), block_n=block_n, tokens=tokens, products=products)

    chunk = data.draw(st.integers(1, 3)) * block_n
    with (
        mock.patch.object(score_triton, "_config", config),
        mock.patch.object(score_triton, "_chunk", return_value=chunk),
    ):
        actual_TN = scores(
            kernel, case, case.prepared(kernel, torch.float32), batch.num_tokens or 1
        )
    assert_close(actual_TN, case.expected(torch.float32), step=tolerance(table.name, device))


@pytest.mark.parametrize("name", FORMATS)
def test_entries_without_a_page_score_minus_infinity(name: str, device: torch.device) -> None:
    """Pages -1, INT_MIN, INT_MAX and one behind the table's end."""
    table = Table(name=name, rows_per_page=16)
    batch = Batch(requests=((0, (64, 3)), (2, (50,)), (1, (64,))), max_entries=80)
    case = Case.build(table, batch, device, missing=len(BAD_PAGES))
    kernel = TritonScore()
    actual_TN = scores(kernel, case, case.prepared(kernel, torch.float32), 4)
    wanted_TN = case.expected(torch.float32)
    assert bool((wanted_TN[0, :32] == -torch.inf).all())
    assert_close(actual_TN, wanted_TN, step=tolerance(name, device))


@pytest.mark.parametrize("name", FORMATS)
def test_a_page_may_end_behind_the_table(name: str, device: torch.device) -> None:
    """Rows of the table's last page that are no rows of the view score minus infinity."""
    table = Table(name=name, rows_per_page=16, pages_per_slot=2)
    case = Case.build(table, Batch(requests=((0, (32,)), (1, (32,))), max_entries=32), device)
    last = max(case.pages[0][0], case.pages[1][0])
    view = evolve(case.inputs.view, num_rows=last * 16 + 5)
    case = evolve(case, inputs=evolve(case.inputs, view=view))
    kernel = TritonScore()
    wanted_TN = case.expected(torch.float32)
    assert bool(wanted_TN.isneginf().any())
    actual_TN = scores(kernel, case, case.prepared(kernel, torch.float32), 2)
    assert_close(actual_TN, wanted_TN, step=tolerance(name, device))


def test_counts_outside_of_the_matrix_are_cut_to_it(device: torch.device) -> None:
    case = Case.build(
        Table(rows_per_page=16), Batch(requests=((0, (64, 64)), (1, (64,))), max_entries=40), device
    )
    case.inputs.num_visible_T[1] = -5
    kernel = TritonScore()
    actual_TN = scores(kernel, case, case.prepared(kernel, torch.float32), 3)
    assert_close(actual_TN, case.expected(torch.float32))


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_nan_stays_with_its_query_and_its_key(tokens: int, device: torch.device) -> None:
    case = Case.build(
        Table(rows_per_page=16), Batch(requests=((0, (50, 64, 40)),), max_entries=64), device
    )
    page = case.pages[0][1]
    case.inputs.view.storage[page * 16 + 3, 2] = torch.nan
    q_THD, weights_TH = case.prepared(TritonScore(), torch.float32)
    q_THD[2, 1, 5] = torch.nan
    chosen = score_triton._config
    with mock.patch.object(
        score_triton, "_config", lambda **facts: evolve(chosen(**facts), tokens=tokens)
    ):
        nan_TN = scores(TritonScore(), case, (q_THD, weights_TH), 3).isnan()
    assert nan_TN[:2].nonzero().tolist() == [[0, 19], [1, 19]]
    assert bool(nan_TN[2, :40].all())
    assert not bool(nan_TN[2, 40:].any())


def test_a_table_without_rows_is_never_read(device: torch.device) -> None:
    case = Case.build(Table(), Batch(requests=((0, (5, 5)),), max_entries=6), device)
    empty = guarded_view(PlainRows(torch.float32, 16), 0, device).view
    inputs = evolve(case.inputs, view=empty)
    out_TN = poisoned([2, 6], torch.float32, device)
    q_THD, weights_TH = case.prepared(TritonScore(), torch.float32)
    TritonScore().score(q_THD, weights_TH, inputs, first_token=0, out_TN=out_TN)
    assert bool((out_TN == -torch.inf).all())


@pytest.mark.parametrize("heads", [64, 70, 150])
def test_heads_beyond_one_product_are_added_up(heads: int, device: torch.device) -> None:
    case = Case.build(
        Table(rows_per_page=32),
        Batch(requests=((1, (9, 40)), (0, (3,))), max_entries=45, heads=heads),
        device,
    )
    kernel = TritonScore()
    actual_TN = scores(kernel, case, case.prepared(kernel, torch.float32), 3)
    assert_close(actual_TN, case.expected(torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_a_deterministic_score_depends_on_its_query_and_key_alone(
    name: str, device: torch.device
) -> None:
    """A token alone, among others of its slot and of other slots, at even and odd places, under other capacities."""
    table = Table(name=name, rows_per_page=16, pages_per_slot=6, dim=32)
    batch = Batch(
        requests=((0, (90, 70, 91)), (-1, (0,)), (2, (96,)), (1, (1, 55))), max_entries=96
    )
    case = Case.build(table, batch, device)
    kernel = TritonScore(deterministic=True)
    given = case.prepared(kernel, torch.bfloat16)
    whole_TN = scores(kernel, case, given, batch.num_tokens)
    for tile in (1, 2, 3):
        assert same_bytes(scores(kernel, case, given, tile), whole_TN)
    narrow = evolve(case, inputs=evolve(case.inputs, max_entries=70))
    assert same_bytes(scores(kernel, narrow, given, 4), whole_TN[:, :70])


def assert_queries(
    out: tuple[Tensor, Tensor], wanted_THD: Tensor, weights_TH: Tensor, *, codes: bool
) -> None:
    q_THD, got_TH = out
    if codes:
        wanted, scale_TH1 = quantize_fp8(wanted_THD.bfloat16(), wanted_THD.shape[-1])
        assert q_THD.dtype == torch.float8_e4m3fn
        assert same_bytes(q_THD.view(torch.uint8), wanted.view(torch.uint8))
        weights_TH = weights_TH * scale_TH1[..., 0]
    else:
        assert same_bytes(q_THD, wanted_THD)
    assert same_bytes(got_TH, weights_TH)


@few
@given(
    name=st.sampled_from(tuple(FORMATS)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    rounding=st.sampled_from((Rounding.NONE, Rounding.HADAMARD_FP4)),
    shape=st.tuples(
        st.integers(0, 4), st.sampled_from((1, 4, 5, 33)), st.sampled_from((16, 64, 128))
    ),
    size=st.sampled_from((1e-6, 1.0, 3e4)),
)
def test_queries_at_position_0_are_rounded_bit_for_bit_in_place(
    name: str,
    dtype: torch.dtype,
    rounding: Rounding,
    shape: tuple[int, int, int],
    size: float,
    device: torch.device,
) -> None:
    tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(1)
    values_THD = (torch.randn(shape, generator=generator) * size).to(device, dtype)
    values_THD[:, heads // 2, : dim // 2] = 0
    memory = guarded([tokens, heads * dim], dtype, device, spare_columns=5)
    memory.inner.copy_(values_THD.flatten(1))
    weights = guarded([tokens, heads], torch.float32, device, spare_columns=3)
    weights.inner.copy_(torch.randn(tokens, heads, generator=generator))
    weights_TH = weights.inner * 0.37
    wanted_THD = values_THD
    if rounding is Rounding.HADAMARD_FP4:
        wanted_THD = round_fp4(hadamard(values_THD))
    rope = RopeTable(torch.ones(tokens, 4, device=device), torch.zeros(tokens, 4, device=device))
    view = guarded_view(FORMATS[name](dim, 64), 64, device).view
    given_THD = memory.inner.unflatten(1, (heads, dim))
    out = TritonScore().queries(
        given_THD, weights.inner, rope=rope, rounding=rounding, scale=0.37, view=view
    )
    assert_queries(out, wanted_THD, weights_TH, codes=name == "fp8")
    assert memory.intact()
    assert weights.intact()
    assert out[0].data_ptr() == given_THD.data_ptr()
    assert out[0].numel() == 0 or out[1].data_ptr() == weights.inner.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "pairs"), [(48, 5), (64, 32), (80, 8)])
def test_queries_turn_as_the_reference_turns_them(
    dim: int, pairs: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(2)
    q_THD = torch.randn(5, 6, dim, generator=generator).to(device, dtype)
    weights_TH = torch.randn(5, 6, generator=generator).to(device)
    angle_TP = torch.rand(5, pairs, generator=generator).to(device) * 100
    rope = RopeTable(angle_TP.cos(), angle_TP.sin())
    view = guarded_view(PlainRows(dtype, dim), 8, device).view
    facts = {"rope": rope, "rounding": Rounding.NONE, "scale": 0.5, "view": view}
    wanted_THD, wanted_TH = TorchScore().queries(q_THD.clone(), weights_TH.clone(), **facts)
    out_THD, out_TH = TritonScore().queries(q_THD.clone(), weights_TH.clone(), **facts)
    step = 1e-6 if dtype == torch.float32 else 2.0**-7
    assert torch.allclose(out_THD.float(), wanted_THD, rtol=step, atol=1e-6)
    assert torch.equal(out_TH, wanted_TH)
    assert same_bytes(out_THD[..., : dim - 2 * pairs], q_THD[..., : dim - 2 * pairs])


@given(
    groups=st.integers(1, 5000),
    entries=st.integers(1, 1 << 20),
    run=st.integers(1, 5),
    native=st.booleans(),
    wide=st.booleans(),
    sms=st.sampled_from((1, 20, 132)),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_chunks_are_whole_tiles_and_fill_the_chip(
    groups: int, entries: int, run: int, native: bool, wide: bool, sms: int
) -> None:
    config = score_triton._config(heads=64, native=native, wide=wide, run=run, hip=False)
    chunk = score_triton._chunk(groups, entries, config, sms)
    assert chunk % config.block_n == 0
    assert config.block_n <= chunk <= max(config.tiles) * config.block_n
    tiles, chunks = -(-entries // config.block_n), -(-entries // chunk)
    # Programs for a third of the places at least, unless there are no more tiles than that.
    assert groups * chunks >= min(groups * tiles, sms * min(config.resident, 4) / 3)


@pytest.mark.parametrize(("run", "tokens"), [(1, 1), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_a_program_takes_no_more_tokens_than_a_request_has(run: int, tokens: int) -> None:
    """Two of two products, where fp8 products are native: elsewhere two tokens at most."""

    def chosen(*, native: bool, heads: int = 64) -> int:
        return score_triton._config(
            heads=heads, native=native, wide=False, run=run, hip=False
        ).tokens

    assert chosen(native=True) == tokens
    assert chosen(native=False) == min(tokens, 2)
    assert chosen(native=True, heads=65) == 1


def test_published_indexers_take_one_or_two_runs_of_keys() -> None:
    """The table of configurations names what the launcher chooses for pages of 64 keys."""
    for variant in score_triton.variants():
        if variant.name.startswith("score"):
            assert variant.constexprs["RUNS"] == variant.constexprs["N"] // 64
            assert variant.constexprs["ALIGN"] > 1
