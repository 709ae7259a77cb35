"""Conformance of a ScoreKernel.

Legend: T tokens, H index heads, D index dim, N entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import Rounding, ScoreKernel
from dsv4.metadata.plans import ScoreInputs
from dsv4.pool.geometry import PagedRows
from dsv4.testing import reference
from dsv4.testing.kernel_setup import INDEX_FORMATS, KernelSetup, Randn, ints, rope_table
from dsv4.testing.memory import guarded_view, poisoned, strided

DIM, PER_PAGE, NUM_PAGES = 32, 3, 11
PAGES = [[4, 0, 9, -1], [7, 10, 1, 3], [2, -1, -1, -1]]
"""Pages of three slots, scattered; page 5, 6 and 8 are nobody's."""


TURNS = [1.0, 0.1, 0.003]


def _query(
    head: Sequence[float], position: int, dtype: torch.dtype, rounding: Rounding, fp8: bool
) -> list[float]:
    """One query as the scorer should read it, float64."""
    values = reference.as_dtype(reference.rotated(head, [position * turn for turn in TURNS]), dtype)
    if rounding is Rounding.HADAMARD_FP4:
        values = reference.as_dtype(reference.hadamard(values), dtype)
        values = reference.block_rounded(
            values, block=32, codes=reference.E2M1, floor=6 * 2.0**-126
        )
    if fp8:
        values = reference.as_dtype(values, torch.bfloat16)
        values = reference.block_rounded(values, block=DIM, codes=reference.E4M3, floor=1e-4)
    return list(values)


@frozen(kw_only=True, eq=False)
class Case:
    """A batch of requests (slot, tokens, committed length at ratio 2) and the keys of their slots."""

    inputs: ScoreInputs
    keys: dict[tuple[int, int], list[float]]
    visible: list[int]
    slots: list[int]

    @classmethod
    def build(
        cls, requests: Sequence[tuple[int, int, int]], name: str, randn: Randn, *, spare: int = 0
    ) -> Case:
        device = randn(1).device
        table = guarded_view(
            INDEX_FORMATS[name](DIM), NUM_PAGES * PER_PAGE, device, spare_columns=64
        )
        slots, visible = [], []
        for slot, num, length in requests:
            slots += [slot] * num
            visible += [(length + i + 1) // 2 if slot >= 0 else 0 for i in range(num)]
        keys: dict[tuple[int, int], list[float]] = {}
        for slot, entries in enumerate(_most(slots, visible)):
            for entry in range(entries):
                row = PAGES[slot][entry // PER_PAGE] * PER_PAGE + entry % PER_PAGE
                values_1D = randn(1, DIM)
                table.view.write(ints([row], device), values_1D)
                keys[slot, entry] = table.view.format.round(values_1D)[0].double().tolist()
        inputs = ScoreInputs(
            view=table.view,
            keys=PagedRows(
                block_table=torch.tensor(PAGES, dtype=torch.int32, device=device),
                rows_per_page=PER_PAGE,
                base=0,
            ),
            slot_T=ints(slots, device),
            num_visible_T=ints(visible, device),
            max_entries=max(visible, default=0) + spare,
            query_lengths=tuple(num for _, num, _ in requests),
            request_slots_B=ints([slot for slot, _, _ in requests], device),
            tile_tokens=len(slots),
        )
        return cls(inputs=inputs, keys=keys, visible=visible, slots=slots)

    def expected(self, q_THD: Tensor, weights_TH: Tensor) -> Tensor:
        """float64 [T, N], token by token, entry by entry, head by head."""
        wanted_TN = torch.full((len(self.slots), self.inputs.max_entries), -torch.inf).double()
        for t, (slot, visible) in enumerate(zip(self.slots, self.visible, strict=True)):
            for entry in range(visible):
                score = 0.0
                for query, weight in zip(q_THD[t].tolist(), weights_TH[t].tolist(), strict=True):
                    key = self.keys[slot, entry]
                    score += weight * max(0.0, sum(a * b for a, b in zip(query, key, strict=True)))
                wanted_TN[t, entry] = score
        return wanted_TN


def read_by(
    kernel: ScoreKernel, q_THD: Tensor, weights_TH: Tensor, case: Case
) -> tuple[Tensor, Tensor]:
    """Queries at position 0, unrounded, as the scorer reads them."""
    rope = rope_table([0] * q_THD.shape[0], TURNS, q_THD.device)
    return kernel.queries(
        q_THD.clone(), weights_TH.clone(), rope=rope, rounding=Rounding.NONE, scale=1.0, view=case.inputs.view
    )  # fmt: skip


def _most(slots: Sequence[int], visible: Sequence[int]) -> list[int]:
    pairs = list(zip(slots, visible, strict=True))
    return [max((v for s, v in pairs if s == slot), default=0) for slot in range(len(PAGES))]


DECODE = [(1, 1, 22), (-1, 1, 0), (0, 1, 15), (2, 0, 4)]
RAGGED = [(0, 5, 12), (-1, 2, 0), (2, 1, 4), (1, 0, 9), (1, 9, 14)]


class ScoreConformance(KernelSetup[ScoreKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "fp4"])
    @pytest.mark.parametrize("requests", [DECODE, RAGGED], ids=["decode", "ragged"])
    def test_1_score_is_the_weighted_sum_of_clipped_products(
        self,
        kernel: ScoreKernel,
        randn: Randn,
        name: str,
        requests: Sequence[tuple[int, int, int]],
    ) -> None:
        """1. score[t, e] = sum_h w[t, h] * relu(q[t, h] . key[e]) in fp32 for e < n_vis(t)."""
        case = Case.build(requests, name, randn)
        tokens = len(case.slots)
        q_THD, weights_TH = randn(tokens, 3, DIM), randn(tokens, 3)
        wanted_THD = q_THD.double()
        if name == "fp8":
            heads = [
                _query(head, 0, q_THD.dtype, Rounding.NONE, fp8=True)
                for head in wanted_THD.flatten(0, 1).tolist()
            ]
            wanted_THD = torch.tensor(heads, dtype=torch.float64).view(q_THD.shape)
        wanted_TN = case.expected(wanted_THD, weights_TH)
        q, weights = read_by(kernel, q_THD, weights_TH, case)
        for given in ((q, weights), (strided(q), strided(weights))):
            out_TN = poisoned([tokens, case.inputs.max_entries], torch.float32, q.device)
            kernel.score(*given, case.inputs, first_token=0, out_TN=out_TN)
            # an fp8 tensor core keeps some 14 bits of a sum of products
            self.close(out_TN, wanted_TN, scale=400 if name == "fp8" else 40)

    @pytest.mark.parametrize("requests", [DECODE, RAGGED], ids=["decode", "ragged"])
    def test_2_other_lanes_are_minus_infinity(
        self, kernel: ScoreKernel, randn: Randn, requests: Sequence[tuple[int, int, int]]
    ) -> None:
        """2. Other lanes are -inf: behind n_vis, of padding, where no page is, over keys that hold NaN."""
        case = Case.build(requests, "fp32", randn, spare=5)
        tokens = len(case.slots)
        out_TN = poisoned([tokens, case.inputs.max_entries], torch.float32, randn(1).device)
        kernel.score(
            randn(tokens, 2, DIM), randn(tokens, 2), case.inputs, first_token=0, out_TN=out_TN
        )
        for t, visible in enumerate(case.visible):
            assert bool((out_TN[t, visible:] == -torch.inf).all())
            assert bool(out_TN[t, :visible].isfinite().all())

    @pytest.mark.parametrize("tile", [1, 2, 4, 7])
    def test_1_tiles_of_tokens_score_as_the_whole(
        self, kernel: ScoreKernel, randn: Randn, tile: int
    ) -> None:
        """1. The tokens [first_token, first_token + T) of the forward, tile by tile."""
        case = Case.build(RAGGED, "fp32", randn)
        tokens = len(case.slots)
        q_THD, weights_TH = randn(tokens, 3, DIM), randn(tokens, 3)
        wanted_TN = case.expected(q_THD, weights_TH)
        for first in range(0, tokens, tile):
            own = slice(first, first + tile)
            out_TN = poisoned([len(case.slots[own]), case.inputs.max_entries], torch.float32, q_THD.device)  # fmt: skip
            kernel.score(q_THD[own], weights_TH[own], case.inputs, first_token=first, out_TN=out_TN)
            self.close(out_TN, wanted_TN[own], scale=40)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "fp4"])
    @pytest.mark.parametrize("rounding", [Rounding.NONE, Rounding.HADAMARD_FP4])
    def test_3_queries_take_the_keys_form(
        self, kernel: ScoreKernel, randn: Randn, dtype: torch.dtype, name: str, rounding: Rounding
    ) -> None:
        """3. Queries are rotated, rounded as the keys are, and e4m3 with one scale a head for fp8 keys; seen through
        the scores of keys that pick one channel each."""
        case = Case.build([(0, 2, 3), (1, 1, 18)], name, randn)
        device, heads = randn(1).device, 2
        q_THD, weights_TH = randn(3, heads, DIM).to(dtype), randn(3, heads)
        rope = rope_table([3, 4, 18], TURNS, device)
        wanted_THD = torch.tensor(
            [
                [_query(head, angle, dtype, rounding, name == "fp8") for head in token]
                for token, angle in zip(q_THD.double().tolist(), [3, 4, 18], strict=True)
            ],
            dtype=torch.float64,
        )
        wide = torch.cat([randn(3, 5).to(dtype), q_THD.flatten(1)], 1)
        given_THD = wide[:, 5:].unflatten(1, (heads, DIM))
        out = kernel.queries(
            given_THD, strided(weights_TH), rope=rope, rounding=rounding, scale=0.25, view=case.inputs.view
        )  # fmt: skip
        out_TN = poisoned([3, case.inputs.max_entries], torch.float32, device)
        kernel.score(*out, case.inputs, first_token=0, out_TN=out_TN)
        exact_TN = case.expected(wanted_THD, weights_TH.double().cpu() * 0.25)
        seen = torch.isfinite(exact_TN)
        assert torch.equal(torch.isfinite(out_TN).cpu(), seen)
        error = (out_TN.cpu().double() - exact_TN)[seen].abs()
        size = exact_TN[seen].abs().max()
        # a value beside a rounding border may fall on its other side: one code of one channel
        assert error.max() <= 0.1 * size, f"error {error.max():.3g} of {size:.3g}"
        assert error.median() <= 2e-4 * size

    def test_2_no_entries_and_no_tokens(self, kernel: ScoreKernel, randn: Randn) -> None:
        """2. A forward in which nothing is visible yet."""
        for requests in ([(0, 1, 0), (1, 1, 0)], [(2, 0, 0)]):
            case = Case.build(requests, "fp32", randn)
            tokens = len(case.slots)
            out_TN = poisoned([tokens, 0], torch.float32, randn(1).device)
            kernel.score(
                randn(tokens, 2, DIM), randn(tokens, 2), case.inputs, first_token=0, out_TN=out_TN
            )
