"""The Triton compressors against the reference and against themselves: real plans, drawn plans, every format.

Legend: T tokens, B requests, E closing windows, S fold segments, J fold steps, C projected channels.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from dsv4.config import LayerKind, UnifiedPoolConfig
from dsv4.kernels import compress_triton
from dsv4.kernels.base import CompressKernel, Rounding
from dsv4.kernels.compress_ref import TorchCompress
from dsv4.kernels.compress_triton import TritonCompress
from dsv4.metadata.plans import CompressorTarget, FoldPlan, OverlapPlan, RopeTable
from dsv4.pool.base import KVPool
from dsv4.pool.formats import PlainRows, RowFormat
from dsv4.testing.compress_bench import CompressBench, Variant
from dsv4.testing.kernel_setup import INDEX_FORMATS, ROW_FORMATS, ints, within_a_step
from dsv4.testing.memory import GuardedView, guarded_view, poisoned, same_bytes
from dsv4.testing.models import page_tokens_of, pool_config, small_model
from dsv4.testing.player import build_builder, build_pool
from dsv4.triton_launch import interpreting
from tests.kernels.accumulators import check_accumulators
from tests.metadata.forwards import batch_of, set_length

CSA, HCA = LayerKind.CSA, LayerKind.HCA
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = {"fp32": 2.0**-3, "bf16": 2.0**-3, "fp8": 2.0**-3, "fp4": 0.5}
"""Of values rounded to fp8 or fp4 on the other side of a border."""
PLAIN_STEP = {"fp32": 2e-5, "bf16": 2.0**-7}
EPS = 1e-6
CONTEXT = 400


@frozen(kw_only=True)
class Case:
    """One forward of one compressor, with the lengths that its slots have reached."""

    kind: LayerKind
    ratio: int
    margin: int
    dim: int
    rope: int
    form: str
    indexer: bool
    rounding: Rounding
    columns: tuple[int, int]
    """Spare columns in front of the projection and behind it."""
    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    padding: int
    seed: int

    @property
    def row_format(self) -> RowFormat:
        if self.indexer:
            return INDEX_FORMATS[self.form](self.dim)
        return ROW_FORMATS[self.form](self.dim, self.rope)

    @property
    def channels(self) -> int:
        """Of the projection."""
        return self.dim * (4 if self.kind is CSA else 2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind, margin = draw(st.sampled_from([CSA, HCA])), draw(st.integers(1, 5))
    ratios = [4, 4, 1, 3, 7] if kind is CSA else [16, 16, 1, 3, 4, 7, 128]
    indexer = kind is CSA and draw(st.booleans())
    if indexer:
        dim, rope = draw(st.sampled_from([(32, 8), (64, 64), (128, 32)]))
        form, rounding = draw(st.sampled_from(sorted(INDEX_FORMATS))), Rounding.HADAMARD_FP4
    else:
        dim, rope = draw(st.sampled_from([(24, 8), (130, 16), (29, 6), (70, 2), (192, 64)]))
        form = draw(st.sampled_from(sorted(ROW_FORMATS)))
        rounding = draw(st.sampled_from([Rounding.NONE, Rounding.FP8]))
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=4))
    slots = draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, len(lengths)))]
    most = [0, 1, 1, margin] if draw(st.booleans()) else [0, 1, margin, margin + 1, 19, 40]
    sizes = [(slot, draw(st.sampled_from(most))) for slot in slots]
    if draw(st.booleans()):
        sizes.insert(draw(st.integers(0, len(sizes))), (-1, draw(st.integers(0, 2))))
    return Case(
        kind=kind, ratio=draw(st.sampled_from(ratios)), margin=margin, dim=dim, rope=rope, form=form,
        indexer=indexer, rounding=rounding, columns=draw(st.sampled_from([(0, 0), (16, 32), (3, 5)])),
        lengths=tuple(lengths), sizes=tuple(sizes), padding=draw(st.sampled_from([0, 0, 3])),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@frozen(kw_only=True, eq=False)
class Tables:
    """Everything that a compressor writes, guarded."""

    state: GuardedView
    entries: GuardedView
    accumulators: GuardedView

    def all(self) -> tuple[GuardedView, ...]:
        return self.state, self.entries, self.accumulators

    def rows(self) -> list[Tensor]:
        return [table.rows() for table in self.all()]

    def changed(self, before: Sequence[Tensor]) -> list[list[int]]:
        """Rows of each table; fails if a guard was hit."""
        return [table.changed(rows) for table, rows in zip(self.all(), before, strict=True)]


class Inputs:
    """A case's plan, made by the pool's own builder, and what a kernel is given with it."""

    def __init__(self, case: Case) -> None:
        self.case, self.generator = case, torch.Generator().manual_seed(case.seed)
        self.pool, self.plan, self.entry_loc_E = self._planned()
        factor = 2 if case.kind is CSA else 1
        self.ape_MC = self.randn(case.ratio, factor * case.dim)
        self.norm = self.randn(case.dim).abs() + 0.3
        num_tokens = self.plan.state_loc_T.shape[0]
        left, right = case.columns
        whole = poisoned((num_tokens, left + case.channels + right), torch.float32, DEVICE)
        self.projected_TC = whole[:, left : left + case.channels]
        self.projected_TC.copy_(self.randn(num_tokens, case.channels))
        if case.padding:  # padding tokens are nobody's: their projections may hold anything
            self.projected_TC[-case.padding :] = torch.nan

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def _planned(self) -> tuple[KVPool, OverlapPlan | FoldPlan, Tensor]:
        case = self.case
        model = small_model([(case.kind, case.ratio)], drafts=0)
        config = pool_config(
            UnifiedPoolConfig, model, max_requests=5, max_context=CONTEXT,
            in_place_tokens=case.margin, page_tokens=page_tokens_of(model, 20),
        )  # fmt: skip
        pool = build_pool(config, model, DEVICE)
        for length in case.lengths:
            slot = pool.acquire()
            pool.reserve(slot, CONTEXT)
            set_length(pool, slot, length)
        builder = build_builder(pool)
        builder.prepare(batch_of(case.sizes, case.padding))
        meta = builder.metadata.for_layer(0, builder.fill())
        target = meta.index if case.indexer else meta.main
        assert meta.state_plan is not None
        assert target is not None
        angle = 3 * self.randn(target.entry_loc_E.shape[0], case.rope // 2)
        rope = RopeTable(angle.cos(), angle.sin())
        return pool, attrs.evolve(meta.state_plan, entry_rope=rope), target.entry_loc_E

    def tables(self) -> Tables:
        """State that the plan reads is random, all else is poison."""
        case, geometry = self.case, self.pool.geometry
        folds = isinstance(self.plan, FoldPlan)
        ring = geometry.in_place_tokens if folds else geometry.overlap_rows(case.ratio)
        num_state, spare = geometry.max_requests * ring, 0 if case.columns[0] == 3 else 4
        state = guarded_view(
            PlainRows(torch.float32, case.channels), num_state, DEVICE, spare_columns=spare
        )
        source = self.plan.source_SJ if isinstance(self.plan, FoldPlan) else self.plan.source_EM
        read = source[(source >= 0) & (source < num_state)].unique().cpu()
        generator = torch.Generator().manual_seed(case.seed + 1)
        values = torch.randn(num_state, case.channels, generator=generator)[read]
        state.view.storage[read.to(DEVICE)] = values.to(DEVICE)
        accumulators = guarded_view(
            PlainRows(torch.float32, 3 * case.dim + 1), geometry.max_requests, DEVICE
        )
        drawn = torch.randn(geometry.max_requests, 3 * case.dim, generator=generator)
        drawn[:, case.dim : 2 * case.dim].abs_().add_(0.1)
        accumulators.view.storage[:, :-1] = drawn.to(DEVICE)
        # as many tokens as earlier forwards can have made final
        folded = [
            max(0, n - random.Random(i).randint(0, case.margin)) for i, n in enumerate(case.lengths)
        ]
        accumulators.view.storage[:, -1] = 0
        accumulators.view.storage[: len(folded), -1] = ints(folded, DEVICE).float()
        num_entries = geometry.entry_base + geometry.entry_rows(case.ratio)
        entries = guarded_view(case.row_format, num_entries, DEVICE, spare_columns=64)
        return Tables(state=state, entries=entries, accumulators=accumulators)

    def run(self, kernel: CompressKernel, tables: Tables) -> None:
        num = self.entry_loc_E.shape[0]
        target = CompressorTarget(
            state_view=tables.state.view,
            entry_view=tables.entries.view,
            entry_loc_E=self.entry_loc_E,
            pooled_EC=poisoned((num, self.case.dim), torch.float32, DEVICE),
            accumulator_view=tables.accumulators.view if self.case.kind is HCA else None,
        )
        call = kernel.fold if self.case.kind is HCA else kernel.overlap
        call(
            self.projected_TC, ape_MC=self.ape_MC, norm=self.norm, eps=EPS, plan=self.plan,  # type: ignore[arg-type]
            target=target, rounding=self.case.rounding,
        )  # fmt: skip

    def entries(self, tables: Tables) -> Tensor:
        """fp32 values of the entries that the plan closes."""
        return tables.entries.view.read(self.entry_loc_E[self.entry_loc_E >= 0]).cpu()


@settings(max_examples=40)
@given(cases())
def test_compress_does_what_the_reference_does_and_touches_nothing_else(case: Case) -> None:
    inputs = Inputs(case)
    ours, theirs = inputs.tables(), inputs.tables()
    before = ours.rows()
    inputs.run(TritonCompress(), ours)
    inputs.run(TorchCompress(), theirs)

    assert ours.changed(before) == theirs.changed(before)
    assert same_bytes(ours.state.rows(), theirs.state.rows())
    every = range(ours.accumulators.view.num_rows)
    check_accumulators(
        ours.accumulators.view.storage.cpu(), theirs.accumulators.view.storage.cpu(), every
    )
    plain = case.rounding is Rounding.NONE and case.form in PLAIN_STEP
    step = PLAIN_STEP[case.form] if plain else STEP[case.form]
    within_a_step(inputs.entries(ours), inputs.entries(theirs), step=step, share=0.05)


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", [CSA, HCA])
def test_nothing_is_computed_on_bf16(
    kind: LayerKind, form: str, no_bf16_arithmetic: object
) -> None:
    for size, indexer in ((1, False), (19, kind is CSA)):
        case = Case(
            kind=kind, ratio=4, margin=1, dim=64, rope=8, form=form, indexer=indexer,
            rounding=Rounding.HADAMARD_FP4 if indexer else Rounding.FP8, columns=(0, 0), lengths=(7,),
            sizes=((0, size),), padding=0, seed=1,
        )  # fmt: skip
        inputs = Inputs(case)
        tables = inputs.tables()
        inputs.run(TritonCompress(), tables)
        assert not inputs.entries(tables).isnan().any()


# the same bits however the tokens came

Arrival = tuple[Variant, str, Rounding, bool]
ARRIVALS: list[Arrival] = [
    (Variant(kind=CSA, ratio=4, margin=1), "bf16", Rounding.FP8, False),
    (Variant(kind=CSA, ratio=4, margin=3), "fp4", Rounding.HADAMARD_FP4, True),
    (Variant(kind=CSA, ratio=7, margin=2), "fp32", Rounding.NONE, False),
    (Variant(kind=HCA, ratio=16, margin=1), "fp8", Rounding.FP8, False),
    (Variant(kind=HCA, ratio=7, margin=4), "fp32", Rounding.NONE, False),
    (Variant(kind=HCA, ratio=3, margin=5), "bf16", Rounding.NONE, False),
]


WIDTH = 64
if not interpreting():  # the published width, and a window of several blocks of a run
    WIDTH = 512
    ARRIVALS.append((Variant(kind=HCA, ratio=100, margin=2), "bf16", Rounding.FP8, False))
every_arrival = pytest.mark.parametrize(
    ("variant", "form", "rounding", "indexer"), ARRIVALS, ids=str
)


def played(arrival: Arrival, size: Callable[[], int]) -> list[Tensor]:
    """Bytes of entries, state and accumulators after forwards of `size()` tokens each."""
    variant, form, rounding, indexer = arrival
    bench = CompressBench(
        TritonCompress(), variant, DEVICE, format_name=form, dim=WIDTH, indexer=indexer
    )
    total = 2 * variant.ratio + 2 * variant.margin + 9
    while (left := total - bench.lengths[1]) > 0:
        bench.forward({1: min(left, size())}, rounding=rounding)
    assert bench.closed(1)
    return bench.memory()


def sizes_of(variant: Variant, seed: int) -> Callable[[], int]:
    """Forwards in place, chunks, and chunks that go on within a window."""
    source = random.Random(seed)
    sizes = [1, variant.margin, variant.margin + 1, variant.ratio + 2, 3 * variant.ratio][seed:]
    return lambda: source.choice(sizes)


@every_arrival
def test_every_byte_is_the_same_token_by_token_and_in_any_chunks(
    variant: Variant, form: str, rounding: Rounding, indexer: bool
) -> None:
    arrival = variant, form, rounding, indexer
    wanted = played(arrival, lambda: 1)
    for seed in range(3):
        actual = played(arrival, sizes_of(variant, seed))
        assert all(same_bytes(a, b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.skipif(not interpreting(), reason="a GPU chooses the order itself")
@every_arrival
def test_programs_of_a_launch_may_run_in_any_order(
    variant: Variant, form: str, rounding: Rounding, indexer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = variant, form, rounding, indexer
    wanted = played(arrival, sizes_of(variant, 0))
    forwards = InterpreterBuilder.set_grid_idx

    def backwards(builder: InterpreterBuilder, *program: int) -> None:
        forwards(builder, *(n - 1 - i for n, i in zip(builder.grid_dim, program, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    actual = played(arrival, sizes_of(variant, 0))
    assert all(same_bytes(a, b) for a, b in zip(actual, wanted, strict=True))


# launches

KERNELS = (
    "overlap_kernel", "state_kernel", "fold_in_place_kernel", "fold_kernel", "finish_kernel",
)  # fmt: skip


class Launches:
    """Stands in for a kernel and counts."""

    def __init__(self, kernel: object, counted: Counter[str], name: str) -> None:
        self.kernel, self.counted, self.name = kernel, counted, name
        self.arg_names = kernel.arg_names  # type: ignore[attr-defined]

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        assert min(grid) > 0
        self.counted[self.name] += 1
        return self.kernel[grid]  # type: ignore[index]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    for name in KERNELS:
        kernel = getattr(compress_triton, name)
        monkeypatch.setattr(compress_triton, name, Launches(kernel, counted, name))
    return counted


@pytest.mark.parametrize("kind", [CSA, HCA])
@pytest.mark.parametrize("length", [0, 15])
def test_a_forward_in_place_is_one_launch_and_one_with_chunks_two(
    kind: LayerKind, length: int, launches: Counter[str]
) -> None:
    bench = CompressBench(TritonCompress(), Variant(kind=kind, ratio=4, margin=2), DEVICE)
    bench.lengths[1] = length
    bench.forward({0: 1, 1: 2, 2: 0}, padding=2)
    assert launches.total() == 1
    bench.forward({0: 1, 1: 19, 2: 2})
    assert launches.total() == 3
    bench.forward({0: 0})
    assert launches.total() <= 4


def test_a_chunk_that_closes_no_window_advances_state_alone(launches: Counter[str]) -> None:
    for kind, num in ((CSA, 1), (HCA, 2)):
        launches.clear()
        bench = CompressBench(TritonCompress(), Variant(kind=kind, ratio=16, margin=1), DEVICE)
        bench.forward({0: 5})
        assert launches.total() == num
        bench.forward({0: 11})
        torch.testing.assert_close(
            bench.entries(0).double(), torch.tensor(bench.expected_entries(0), dtype=torch.float64),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_no_configuration_depends_on_the_batch() -> None:
    """Deterministic mode needs one configuration a width."""
    for dim, width, warps in ((512, 512, 4), (128, 128, 1), (24, 32, 1), (1000, 1024, 8)):
        config = compress_triton.config_of(dim, hip=False, interpreted=False)
        assert (config.width, config.num_warps) == (width, warps)
