"""The fold of the Triton compressors: its step, and segments of tokens from anywhere.

Legend: S fold segments, J fold steps.
"""

from __future__ import annotations

import random

import attrs
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.kernels.base import CompressKernel, Rounding
from dsv4.kernels.compress_ref import TorchCompress
from dsv4.kernels.compress_triton import OPTIONS, TritonCompress
from dsv4.kernels.entry_triton import tree_sum
from dsv4.kernels.fold_triton import fold_step
from dsv4.metadata.plans import CompressorTarget, FoldPlan, RopeTable
from dsv4.pool.fold import fold_step as torch_fold_step
from dsv4.pool.formats import PlainRows
from dsv4.testing.kernel_setup import NO_ROWS, ints
from dsv4.testing.memory import guarded_view, poisoned, same_bytes
from tests.kernels.accumulators import check_accumulators

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
STATE_ROWS = 11
"""State rows that drawn segments read."""


class Segments:
    """Fold segments of requests whose tokens lie anywhere: state rows, tokens of this forward in runs, alone or with
    gaps, and what is no row. An accumulator may have folded any number of a window's tokens."""

    def __init__(self, ratio: int, num_requests: int, seed: int) -> None:
        self.source, self.ratio, self.each = random.Random(seed), ratio, ratio + 3
        self.num_tokens = num_requests * self.each
        self.num_rows = STATE_ROWS + self.num_tokens
        self.bad = [*NO_ROWS, self.num_rows + self.num_tokens]
        self.positions: list[int] = []
        self.counts: list[int] = []
        windows: list[tuple[int, int]] = []
        own, indptr, folded = [], [0], []
        for request in range(num_requests):
            first, closing = self.source.randrange(3), self.source.randrange(3)
            start = ratio * first + self.source.randrange(ratio)
            # neighbouring tokens have neighbouring positions
            self.positions += range(start, start + self.each)
            windows += [(request, ratio * (first + i)) for i in range(closing)]
            indptr.append(len(windows))
            own.append((request, ratio * (first + closing)))
            self.counts.append(max(0, ratio * first + self.source.randint(-2, 2 * ratio)))
            folded.append(ratio * (first + closing) + self.source.randrange(ratio))
        # lanes that close nothing, as where the host knows an upper bound alone
        spare = [(-1, 0)] * self.source.randrange(2)
        self.num_closing = len(windows) + len(spare)
        self.entry_locs = [*range(len(windows)), *[-1] * len(spare)]
        self.plan = self._plan([*windows, *spare, *own], indptr, folded)

    def _line(self, request: int, start: int) -> list[tuple[int, int]]:
        """(row, position) of each step of a segment."""
        whole = self.source.random() < 0.5
        token = request * self.each + self.source.randrange(self.each)
        line = []
        for j in range(self.ratio):
            kind = "own" if whole else self.source.choice(["own", "state", "none"])
            if j == 0 and self.source.random() < 0.3:
                kind = "state"
            at = min(token + j, (request + 1) * self.each - 1)
            if request < 0 or kind == "none":
                line.append((self.source.choice(self.bad), start + j))
            elif kind == "own":
                line.append((self.num_rows + at, self.positions[at]))
            else:
                line.append((self.source.randrange(STATE_ROWS), start + j))
        return line

    def _plan(
        self, segments: list[tuple[int, int]], indptr: list[int], folded: list[int]
    ) -> FoldPlan:
        num_requests = len(folded)
        lines = [self._line(*segment) for segment in segments]
        angle = torch.linspace(-3, 3, 4 * self.num_closing, device=DEVICE).view(-1, 4)
        # behind the rows that are read: what a program reads must not depend on which runs first
        locs = [
            STATE_ROWS + t if t % 3 else self.source.choice(NO_ROWS) for t in range(self.num_tokens)
        ]

        def table(column: int) -> Tensor:
            flat = [step[column] for line in lines for step in line]
            return ints(flat, DEVICE).view(-1, self.ratio)

        return FoldPlan(
            ratio=self.ratio,
            in_place=False,
            starts_B1=ints([self.each * b for b in range(num_requests + 1)], DEVICE),
            closing_indptr_B1=ints(indptr, DEVICE),
            ape_row_T=ints([p % self.ratio for p in self.positions], DEVICE),
            state_loc_T=ints(locs, DEVICE),
            source_SJ=table(0),
            position_SJ=table(1),
            start_S=ints([start for _, start in segments], DEVICE),
            accumulator_row_S=ints([request for request, _ in segments], DEVICE),
            accumulator_loc_B=ints(range(num_requests), DEVICE),
            folded_B=ints(folded, DEVICE),
            entry_rope=RopeTable(angle.cos(), angle.sin()),
        )

    def fold(self, kernel: CompressKernel, plan: FoldPlan) -> list[Tensor]:
        """fp32 accumulators, state and entries after a fold of random rows."""
        generator, dim = torch.Generator().manual_seed(self.num_tokens), 20

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        forms = [PlainRows(torch.float32, width) for width in (3 * dim + 1, 2 * dim, dim)]
        sizes = [len(self.counts), self.num_rows, self.num_closing + 1]
        tables = [
            guarded_view(form, num, DEVICE, spare_columns=4)
            for form, num in zip(forms, sizes, strict=True)
        ]
        accumulators, state, entries = (table.view for table in tables)
        accumulators.storage[:, :-1] = randn(len(self.counts), 3 * dim).abs() + 0.1
        accumulators.storage[:, -1] = ints(self.counts, DEVICE).float()
        state.storage[:STATE_ROWS] = randn(STATE_ROWS, 2 * dim)
        projected = randn(self.num_tokens, 2 * dim)
        projected[:: self.each, dim:] = -torch.inf  # tokens without weight
        kernel.fold(
            projected, ape_MC=randn(self.ratio, dim), norm=randn(dim), eps=EPS, plan=plan,
            rounding=Rounding.NONE,
            target=CompressorTarget(
                state_view=state, entry_view=entries, accumulator_view=accumulators,
                entry_loc_E=ints(self.entry_locs, DEVICE),
                pooled_EC=poisoned((self.num_closing, dim), torch.float32, DEVICE),
            ),
        )  # fmt: skip
        assert all(table.memory.intact() for table in tables)
        return [accumulators.storage.cpu(), state.storage.cpu(), entries.storage.cpu()]


@settings(max_examples=16)
@given(st.sampled_from([1, 3, 7, 9]), st.integers(1, 2), st.integers(0, 9999))
def test_segments_of_tokens_from_anywhere_fold_alike_in_place_and_in_chunks(
    ratio: int, num_requests: int, seed: int
) -> None:
    drawn = Segments(ratio, num_requests, seed)
    plan = drawn.plan
    chunks = drawn.fold(TritonCompress(), plan)
    in_place = drawn.fold(TritonCompress(), attrs.evolve(plan, in_place=True))
    assert all(same_bytes(a, b) for a, b in zip(chunks, in_place, strict=True))

    legal = (plan.source_SJ >= 0) & (plan.source_SJ < drawn.num_rows + drawn.num_tokens)
    clean = attrs.evolve(plan, source_SJ=plan.source_SJ.where(legal, -1))
    wanted = drawn.fold(TorchCompress(), clean)
    check_accumulators(chunks[0], wanted[0], range(num_requests))
    assert same_bytes(chunks[1], wanted[1])
    # windows without a token have no entry: 0 / 0
    torch.testing.assert_close(chunks[2], wanted[2], rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("row", [-(2**31), -1, 2, 2**31 - 1])
def test_an_accumulator_without_a_row_is_written_nowhere(row: int, in_place: bool) -> None:
    drawn = Segments(3, 2, seed=3)
    plan = attrs.evolve(drawn.plan, in_place=in_place, accumulator_loc_B=ints([0, row], DEVICE))
    accumulators = drawn.fold(TritonCompress(), plan)[0]
    everywhere = drawn.fold(TritonCompress(), drawn.plan)[0]
    nowhere = drawn.fold(TritonCompress(), attrs.evolve(plan, folded_B=plan.folded_B * 0))[0]
    assert same_bytes(accumulators[0], everywhere[0])
    assert same_bytes(accumulators[1], nowhere[1])
    assert not same_bytes(nowhere[1], everywhere[1])


@triton.jit
def _step_kernel(state_ptr, gate_ptr, value_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    maximum, total, weighted = fold_step(
        tl.load(state_ptr + lane),
        tl.load(state_ptr + N + lane),
        tl.load(state_ptr + 2 * N + lane),
        tl.load(gate_ptr + lane),
        tl.load(value_ptr + lane),
    )
    tl.store(out_ptr + lane, maximum)
    tl.store(out_ptr + N + lane, total)
    tl.store(out_ptr + 2 * N + lane, weighted)


def test_a_fold_step_is_the_pools_own() -> None:
    """The pool brings an accumulator up to the length that it exports with torch's."""
    inf = torch.inf
    state = torch.tensor([
        [-inf, -inf, 0.5, 0.5, 0.5, 2.0, -3.0, 90.0],
        [0.0, 0.0, 1.5, 1.5, 1.5, 3.0, 1.0, 2.0],
        [0.0, 0.0, -4.0, -0.0, 4.0, 7.0, 0.1, 1.0],
    ], device=DEVICE)  # fmt: skip
    gate = torch.tensor([1.0, -inf, -inf, -inf, 0.5, 2.5, -3.2, -90.0], device=DEVICE)
    value = torch.tensor([3.0, torch.nan, torch.nan, torch.inf, 2.0, -1.0, 0.3, 5.0], device=DEVICE)
    out = torch.empty_like(state)
    _step_kernel[(1,)](state, gate, value, out, N=8, **OPTIONS)
    wanted = torch.stack(torch_fold_step(*state, gate, value))
    assert same_bytes(out[:, :5], wanted[:, :5]), "no exponential but of 0: exact"
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=0)


@triton.jit
def _sum_kernel(x_ptr, out_ptr, N: tl.constexpr, D: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(out_ptr + tl.arange(0, N), tree_sum(x, N, D))


@pytest.mark.parametrize("lanes", [1, 2, 64, 512])
def test_sums_add_neighbours_first(lanes: int) -> None:
    x = torch.randn(2, lanes, generator=torch.Generator().manual_seed(lanes)).to(DEVICE)
    out = torch.empty(2, device=DEVICE)
    _sum_kernel[(1,)](x, out, N=2, D=lanes)
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    assert same_bytes(out, x[:, 0])
