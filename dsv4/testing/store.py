"""Conformance of a StoreKernel.

Legend: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import Rounding, StoreKernel
from dsv4.metadata.plans import RopeTable
from dsv4.testing import reference
from dsv4.testing.kernel_setup import (
    NO_ROWS,
    ROW_FORMATS,
    KernelSetup,
    Randn,
    ints,
    rope_table,
    within_a_step,
)
from dsv4.testing.memory import GuardedView, guarded_view, poisoned, same_bytes, strided

DIM, ROPE_DIM, NUM_ROWS, EPS = 76, 6, 11, 1e-5
TURNS = [1.0, 0.21, 0.007]
POSITIONS = [0, 3, 4, 5, 6, 91, 1000]
STEP = {"fp32": 1e-5, "bf16": 2.0**-7, "fp8": 2.0**-3}
"""One step of the format, over the largest value of the row."""
CASES = [
    ("fp32", Rounding.NONE),
    ("bf16", Rounding.NONE),
    ("fp8", Rounding.NONE),
    ("fp32", Rounding.FP8),
    ("bf16", Rounding.FP8),
    ("fp8", Rounding.FP8),
]


@frozen(kw_only=True, eq=False)
class Inputs:
    q_THD: Tensor
    kv_TD: Tensor
    norm: Tensor
    rope: RopeTable

    @classmethod
    def random(cls, randn: Randn, device: torch.device) -> Inputs:
        tokens = len(POSITIONS)
        return cls(
            q_THD=randn(tokens, 3, DIM) * 2,
            kv_TD=randn(tokens, DIM) * 3,
            norm=randn(DIM).abs() + 0.3,
            rope=rope_table(POSITIONS, TURNS, device),
        )


class StoreConformance(KernelSetup[StoreKernel]):
    """Subclass and give the fixture `kernel`."""

    def test_1_queries_are_normed_per_head_then_rotated(
        self, kernel: StoreKernel, randn: Randn, device: torch.device
    ) -> None:
        """1. Queries: per-head RMS norm without weight, then RoPE."""
        inputs = Inputs.random(randn, device)
        table = guarded_view(ROW_FORMATS["fp32"](DIM, ROPE_DIM), NUM_ROWS, device)
        wanted = [
            [
                reference.rotated(reference.rms_normed(head, EPS), [p * turn for turn in TURNS])
                for head in token
            ]
            for p, token in zip(POSITIONS, inputs.q_THD.double().tolist(), strict=True)
        ]
        for q_THD in (inputs.q_THD, strided(inputs.q_THD)):
            out = _store(kernel, inputs, table, [-1] * len(POSITIONS), q_THD=q_THD)
            self.close(out, wanted, scale=10)
        half = _store(kernel, inputs, table, [-1] * 7, q_THD=inputs.q_THD.bfloat16())
        assert half.dtype == torch.bfloat16

    @pytest.mark.parametrize(("name", "rounding"), CASES)
    def test_2_kv_is_normed_rotated_rounded_then_stored(
        self,
        kernel: StoreKernel,
        randn: Randn,
        device: torch.device,
        name: str,
        rounding: Rounding,
    ) -> None:
        """2. KV: RMSNorm, RoPE, rounding, then the row format's own rounding."""
        inputs = Inputs.random(randn, device)
        row_format = ROW_FORMATS[name](DIM, ROPE_DIM)
        wanted = _rows(inputs, rounding, row_format.value_dtype, packed=name == "fp8")
        rows = [4, 0, 10, 7, 1, 9, 2]
        for spare, kv_TD in ((0, inputs.kv_TD), (64, strided(inputs.kv_TD))):
            table = guarded_view(row_format, NUM_ROWS, device, spare_columns=spare)
            _store(kernel, inputs, table, rows, kv_TD=kv_TD, rounding=rounding)
            read = table.view.read(ints(rows, device))
            step = 2.0**-3 if rounding is Rounding.FP8 else STEP[name]
            within_a_step(read, wanted, step=step, share=0.05)

    @pytest.mark.parametrize(("name", "rounding"), CASES)
    def test_3_fresh_holds_exactly_what_reading_the_stored_row_gives_back(
        self,
        kernel: StoreKernel,
        randn: Randn,
        device: torch.device,
        name: str,
        rounding: Rounding,
    ) -> None:
        """3. `fresh` holds exactly what reading the stored row gives back, also of tokens that are not stored; a tail
        store of it is bit for bit what an in-place store would have written."""
        inputs = Inputs.random(randn, device)
        row_format = ROW_FORMATS[name](DIM, ROPE_DIM)
        direct = guarded_view(row_format, NUM_ROWS, device)
        tail = guarded_view(row_format, NUM_ROWS, device)
        rows = [10, 3, 4, 5, 0, 1, 2]
        fresh_TD = poisoned([len(rows), DIM], torch.float32, device)
        _store(kernel, inputs, direct, rows, fresh_TD=fresh_TD, rounding=rounding)
        assert same_bytes(direct.view.read(ints(rows, device)), fresh_TD)
        later_TD = poisoned([len(rows), DIM], torch.float32, device)
        _store(kernel, inputs, tail, [-1] * len(rows), fresh_TD=later_TD, rounding=rounding)
        assert same_bytes(later_TD, fresh_TD)
        kernel.store_tail(later_TD, tail_loc_T=ints(rows, device), view=tail.view)
        assert same_bytes(tail.rows(), direct.rows())

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
    def test_4_rows_are_written_only_where_loc_is_a_row_of_the_view(
        self, kernel: StoreKernel, randn: Randn, device: torch.device, name: str
    ) -> None:
        """4. Rows are written only where loc is a row of the view: not at -1, INT_MIN, R, INT_MAX."""
        inputs = Inputs.random(randn, device)
        fresh_TD = randn(len(POSITIONS), DIM)
        for rows in (
            [0, *NO_ROWS],
            [NUM_ROWS, NUM_ROWS + 1, -1, NUM_ROWS - 1, -NUM_ROWS, -(2**31), 2**31 - 1],
            [-1] * len(POSITIONS),
            [NUM_ROWS] * len(POSITIONS),
        ):
            table = guarded_view(ROW_FORMATS[name](DIM, ROPE_DIM), NUM_ROWS, device)
            before, legal = table.rows(), sorted(row for row in rows if 0 <= row < NUM_ROWS)
            _store(kernel, inputs, table, rows)
            assert table.changed(before) == legal
            table = guarded_view(ROW_FORMATS[name](DIM, ROPE_DIM), NUM_ROWS, device)
            kernel.store_tail(fresh_TD, tail_loc_T=ints(rows, device), view=table.view)
            assert table.changed(before) == legal

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
    def test_5_no_other_byte_of_the_table_changes(
        self, kernel: StoreKernel, randn: Randn, device: torch.device, name: str
    ) -> None:
        """5. No other byte of the table changes: neither around a strided table nor in the rows' planes."""
        inputs = Inputs.random(randn, device)
        table = guarded_view(ROW_FORMATS[name](DIM, ROPE_DIM), 71, device, spare_columns=64)
        _store(kernel, inputs, table, [63, 64, 0, 1, 70, 31, 65])
        before = table.rows()
        _store(kernel, inputs, table, [2, -1, 66, -1, 30, 71, 62])
        assert table.changed(before) == [2, 30, 62, 66]

    def test_5_a_store_of_no_tokens_changes_nothing(
        self, kernel: StoreKernel, randn: Randn, device: torch.device
    ) -> None:
        """5. No tokens: nothing is written, and the queries are empty."""
        inputs = Inputs.random(randn, device)
        table = guarded_view(ROW_FORMATS["fp32"](DIM, ROPE_DIM), NUM_ROWS, device)
        before = table.rows()
        out = kernel.store(
            inputs.q_THD[:0],
            inputs.kv_TD[:0],
            kv_norm=inputs.norm,
            eps=EPS,
            rope=RopeTable(inputs.rope.cos_TP[:0], inputs.rope.sin_TP[:0]),
            store_loc_T=ints([], device),
            view=table.view,
            rounding=Rounding.NONE,
            fresh_TD=None,
        )
        assert out.shape == (0, 3, DIM)
        assert table.changed(before) == []


def _store(
    kernel: StoreKernel,
    inputs: Inputs,
    table: GuardedView,
    rows: list[int],
    *,
    q_THD: Tensor | None = None,
    kv_TD: Tensor | None = None,
    fresh_TD: Tensor | None = None,
    rounding: Rounding = Rounding.NONE,
) -> Tensor:
    return kernel.store(
        inputs.q_THD if q_THD is None else q_THD,
        inputs.kv_TD if kv_TD is None else kv_TD,
        kv_norm=inputs.norm,
        eps=EPS,
        rope=inputs.rope,
        store_loc_T=ints(rows, inputs.kv_TD.device),
        view=table.view,
        rounding=rounding,
        fresh_TD=fresh_TD,
    )


def _rows(inputs: Inputs, rounding: Rounding, dtype: torch.dtype, *, packed: bool) -> Tensor:
    """float64 [T, D]: norm, rotation, cast to the row's value dtype, official rounding, and the packed row's own."""
    norm = inputs.norm.double().tolist()
    rows = []
    for position, kv in zip(POSITIONS, inputs.kv_TD.double().tolist(), strict=True):
        row = reference.rms_normed(kv, EPS, norm)
        row = reference.rotated(row, [position * turn for turn in TURNS])
        row = reference.as_dtype(row, dtype)
        if packed or rounding is Rounding.FP8:
            row = reference.rounded(row, Rounding.FP8, rope_dim=ROPE_DIM)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)
