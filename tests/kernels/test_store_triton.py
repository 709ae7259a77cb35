"""The Triton store against the reference: drawn shapes, all row formats, poisoned surroundings."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.kernels.base import Rounding
from dsv4.kernels.store_ref import TorchStore, rounded
from dsv4.kernels.store_triton import TritonStore
from dsv4.metadata.plans import RopeTable
from dsv4.pool.base import KVView
from dsv4.pool.formats import PlainRows, RowFormat
from dsv4.testing.kernel_setup import NO_ROWS, ROW_FORMATS, within_a_step
from dsv4.testing.memory import guarded, guarded_view, poisoned, same_bytes

NUM_ROWS = 13
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = {"fp32": 1e-5, "bf16": 2.0**-7, "fp8": 2.0**-3}
ROUNDINGS = [Rounding.NONE, Rounding.FP8]


@frozen(kw_only=True)
class Case:
    """One drawn call."""

    heads: int
    nope: int
    rope: int
    rows: list[int]
    form: str
    rounding: Rounding
    dtype: torch.dtype
    fresh: bool
    seed: int

    @property
    def dim(self) -> int:
        return self.nope + self.rope

    @property
    def row_format(self) -> RowFormat:
        return ROW_FORMATS[self.form](self.dim, self.rope)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(
        st.lists(st.integers(0, NUM_ROWS - 1), max_size=9, unique=True).flatmap(st.permutations)
    )
    bad = draw(st.lists(st.sampled_from([*NO_ROWS, NUM_ROWS, NUM_ROWS + 3]), max_size=3))
    return Case(
        heads=draw(st.sampled_from([1, 3, 8, 9])),
        nope=draw(st.sampled_from([1, 10, 29, 64, 70, 130])),
        rope=draw(st.sampled_from([2, 6, 16])),
        rows=draw(st.permutations([*rows, *bad])),
        form=draw(st.sampled_from(sorted(ROW_FORMATS))),
        rounding=draw(st.sampled_from(ROUNDINGS)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        fresh=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@frozen(kw_only=True, eq=False)
class Inputs:
    q_THD: Tensor
    kv_TD: Tensor
    norm: Tensor
    rope: RopeTable
    loc: Tensor
    whole: Tensor
    """The projection that q and kv are columns of."""

    @classmethod
    def of(cls, case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(case.seed)
        tokens, dim, heads = len(case.rows), case.dim, case.heads
        whole = poisoned((tokens + 1, 5 + (heads + 1) * dim + 3), case.dtype, DEVICE)
        values = 3 * torch.randn(tokens, (heads + 1) * dim, generator=generator)
        whole[:tokens, 5:-3] = values.to(DEVICE)
        angle = 6 * torch.randn(tokens, case.rope // 2, generator=generator)
        norm = torch.randn(dim, generator=generator).abs() + 0.3
        return cls(
            q_THD=whole[:tokens, 5 + dim : -3].unflatten(1, (heads, dim)),
            kv_TD=whole[:tokens, 5 : 5 + dim],
            norm=norm.to(DEVICE),
            rope=RopeTable(angle.cos().to(DEVICE), angle.sin().to(DEVICE)),
            loc=torch.tensor(case.rows, dtype=torch.int32, device=DEVICE),
            whole=whole,
        )


def _store(
    inputs: Inputs,
    view: KVView,
    rounding: Rounding,
    fresh_TD: Tensor | None,
    kernel: TritonStore | TorchStore,
) -> Tensor:
    return kernel.store(
        inputs.q_THD,
        inputs.kv_TD,
        kv_norm=inputs.norm,
        eps=1e-6,
        rope=inputs.rope,
        store_loc_T=inputs.loc,
        view=view,
        rounding=rounding,
        fresh_TD=fresh_TD,
    )


def _exact(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    """Queries and unrounded KV of the reference, from float64 inputs."""
    dim, tokens = case.dim, len(case.rows)
    form = PlainRows(torch.float32, dim)
    view = KVView(torch.zeros(form.storage_shape(1), device=DEVICE), 1, form)
    wide = Inputs(
        q_THD=inputs.q_THD.double(),
        kv_TD=inputs.kv_TD.double(),
        norm=inputs.norm.double(),
        rope=RopeTable(inputs.rope.cos_TP.double(), inputs.rope.sin_TP.double()),
        loc=torch.full((tokens,), -1, dtype=torch.int32, device=DEVICE),
        whole=inputs.whole,
    )
    kv_TD = torch.zeros(tokens, dim, dtype=torch.float64, device=DEVICE)
    return _store(wide, view, Rounding.NONE, kv_TD, TorchStore()), kv_TD


@settings(max_examples=40)
@given(cases())
def test_store_does_what_the_reference_does_and_touches_nothing_else(case: Case) -> None:
    inputs = Inputs.of(case)
    outside = inputs.whole.clone()
    wanted_q, kv_TD = _exact(inputs, case)
    form, tokens = case.row_format, len(case.rows)
    table = guarded_view(form, NUM_ROWS, DEVICE, spare_columns=16)
    fresh = guarded((tokens, case.dim), form.value_dtype, DEVICE, spare_columns=4)
    before = table.rows()
    given_fresh = fresh.inner if case.fresh else None
    q_THD = _store(inputs, table.view, case.rounding, given_fresh, TritonStore())

    assert q_THD.dtype == case.dtype
    assert q_THD.shape == wanted_q.shape
    step = 1e-5 if case.dtype == torch.float32 else 2.0**-7
    within_a_step(q_THD.flatten(1), wanted_q.flatten(1).cpu(), step=step, share=1)
    outside[:tokens, 5 + case.dim : -3] = inputs.whole[:tokens, 5 + case.dim : -3]
    assert same_bytes(inputs.whole, outside), "more than the queries was overwritten"

    assert table.changed(before) == sorted(row for row in case.rows if 0 <= row < NUM_ROWS)
    held = [(token, row) for token, row in enumerate(case.rows) if 0 <= row < NUM_ROWS]
    read = table.view.read(torch.tensor([row for _, row in held], device=DEVICE).int())
    value = rounded(kv_TD.float(), case.rounding, rope_dim=case.rope, value_dtype=form.value_dtype)
    wanted = form.round(value.float()).cpu()
    lanes = [token for token, _ in held]
    coarse = case.form if case.rounding is Rounding.NONE else "fp8"
    within_a_step(read, wanted[lanes], step=STEP[coarse], share=0.1)
    assert fresh.intact()
    if case.fresh:
        within_a_step(fresh.inner, wanted, step=STEP[coarse], share=0.1)
        assert same_bytes(fresh.inner[lanes].float(), read)


@settings(max_examples=15)
@given(cases())
def test_a_tail_store_writes_the_bytes_of_a_store_in_place(case: Case) -> None:
    direct = guarded_view(case.row_format, NUM_ROWS, DEVICE)
    tail = guarded_view(case.row_format, NUM_ROWS, DEVICE)
    fresh_TD = poisoned((len(case.rows), case.dim), case.row_format.value_dtype, DEVICE)
    _store(Inputs.of(case), direct.view, case.rounding, None, TritonStore())
    before = tail.rows()
    inputs = Inputs.of(case)
    nowhere = Inputs(
        q_THD=inputs.q_THD,
        kv_TD=inputs.kv_TD,
        norm=inputs.norm,
        rope=inputs.rope,
        loc=torch.full_like(inputs.loc, -1),
        whole=inputs.whole,
    )
    _store(nowhere, tail.view, case.rounding, fresh_TD, TritonStore())
    assert tail.changed(before) == []
    TritonStore().store_tail(fresh_TD, tail_loc_T=inputs.loc, view=tail.view)
    assert tail.memory.intact()
    assert same_bytes(tail.rows(), direct.rows())


@pytest.mark.parametrize("form", sorted(ROW_FORMATS))
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_equal_values_round_to_the_references_bits(form: str, rounding: Rounding) -> None:
    """KV of +-1 without rotation: norm and weight are exact, so that the values before rounding are the weights."""
    dim, rope = 76, 6
    generator = torch.Generator().manual_seed(3)
    norm = torch.randn(dim, generator=generator) * torch.logspace(-6, 3, dim)
    # Half way between codes, and just above half the range: 228 rounds to 224, which has two encodings.
    norm[:8] = torch.tensor([228.0, 0.5, 18.0, 17.0, 19.0, 1.0, 2.0**-9, 3 * 2.0**-10])
    sign = torch.randint(0, 2, (5, dim), generator=generator) * 2.0 - 1
    rows = torch.tensor([3, 0, -1, 12, 7], dtype=torch.int32, device=DEVICE)
    table = guarded_view(ROW_FORMATS[form](dim, rope), NUM_ROWS, DEVICE)
    fresh_TD = poisoned((5, dim), table.view.format.value_dtype, DEVICE)
    still = torch.ones(5, rope // 2, device=DEVICE)
    TritonStore().store(
        torch.ones(5, 1, dim, device=DEVICE),
        sign.to(DEVICE),
        kv_norm=norm.to(DEVICE),
        eps=0.0,
        rope=RopeTable(still, torch.zeros_like(still)),
        store_loc_T=rows,
        view=table.view,
        rounding=rounding,
        fresh_TD=fresh_TD,
    )
    value = rounded(
        (sign * norm).to(DEVICE),
        rounding,
        rope_dim=rope,
        value_dtype=table.view.format.value_dtype,
    ).float()
    wanted = table.view.format.round(value)
    assert same_bytes(fresh_TD.float(), wanted)
    stored = rows >= 0
    assert same_bytes(table.view.read(rows[stored]), wanted[stored])
    tail = guarded_view(ROW_FORMATS[form](dim, rope), NUM_ROWS, DEVICE)
    TritonStore().store_tail(fresh_TD, tail_loc_T=rows, view=tail.view)
    assert same_bytes(tail.rows(), table.rows())


@pytest.mark.parametrize("form", sorted(ROW_FORMATS))
def test_a_tokens_bits_do_not_depend_on_the_others(form: str) -> None:
    case = Case(
        heads=9,
        nope=70,
        rope=6,
        rows=[5, 1, 9, 0, 2, 12, 7],
        form=form,
        rounding=Rounding.FP8,
        dtype=torch.bfloat16,
        fresh=True,
        seed=5,
    )
    together, alone = Inputs.of(case), Inputs.of(case)
    table = guarded_view(case.row_format, NUM_ROWS, DEVICE)
    fresh_TD = poisoned((7, case.dim), case.row_format.value_dtype, DEVICE)
    q_THD = _store(together, table.view, case.rounding, fresh_TD, TritonStore())
    for token in (0, 4, 6):
        one = slice(token, token + 1)
        single = Inputs(
            q_THD=alone.q_THD[one],
            kv_TD=alone.kv_TD[one],
            norm=alone.norm,
            rope=RopeTable(alone.rope.cos_TP[one], alone.rope.sin_TP[one]),
            loc=alone.loc[one],
            whole=alone.whole,
        )
        other = guarded_view(case.row_format, NUM_ROWS, DEVICE)
        fresh_1D = poisoned((1, case.dim), case.row_format.value_dtype, DEVICE)
        q_1HD = _store(single, other.view, case.rounding, fresh_1D, TritonStore())
        assert same_bytes(q_1HD, q_THD[one])
        assert same_bytes(fresh_1D, fresh_TD[one])
        assert same_bytes(other.rows()[case.rows[token]], table.rows()[case.rows[token]])
