"""Reading and writing rows in a kernel against the row formats, byte for byte."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import ConfigError
from dsv4.kernels.base import Rounding
from dsv4.kernels.rows_triton import load_rows, rounded, rounding_code, row_args, store_rows, stored
from dsv4.kernels.store_ref import rounded as rounded_by_reference
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, PackedFp8Rows, PlainRows, RowFormat
from dsv4.testing.kernel_setup import NO_ROWS
from dsv4.testing.memory import guarded_view, same_bytes
from dsv4.triton_launch import next_pow2

NUM_ROWS = 11
FORMATS = [
    PlainRows(torch.float32, 76),
    PlainRows(torch.bfloat16, 33),
    PackedFp8Rows(76, 6),
    PackedFp8Rows(31, 4),
    PackedFp8Rows(600, 64, plane_rows=2),
    PackedFp8Rows(512, 64),
    PackedFp8Rows(32, 0, plane_rows=1),
    IndexFp8Rows(128),
    IndexFp8Rows(33, plane_rows=3),
    IndexFp4Rows(128),
    IndexFp4Rows(70, plane_rows=4),
    IndexFp4Rows(8),
]


@triton.jit
def _load_kernel(
    ptr,
    stride,
    num_rows,
    row_ptr,
    out_ptr,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    line = tl.arange(0, N)
    row = tl.load(row_ptr + line)
    ok = (row >= 0) & (row < num_rows)
    x = load_rows(ptr, stride, row, ok, KIND, ROW_DIM, NOPE, PLANE_ROWS, N, D)
    tl.store(out_ptr + line[:, None] * D + tl.arange(0, D)[None, :], x)


@triton.jit
def _store_kernel(
    ptr,
    stride,
    num_rows,
    row_ptr,
    x_ptr,
    stored_ptr,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    line = tl.arange(0, N)
    lane = tl.arange(0, D)[None, :]
    there = lane < ROW_DIM
    row = tl.load(row_ptr + line)
    place = line[:, None] * ROW_DIM + lane
    x = tl.load(x_ptr + place, mask=there, other=0.0)
    ok = (row >= 0) & (row < num_rows)
    store_rows(ptr, stride, row, ok, x, KIND, ROW_DIM, NOPE, PLANE_ROWS, N, D)
    tl.store(stored_ptr + place, stored(x, KIND, ROW_DIM, NOPE, N, D), mask=there)


@triton.jit
def _round_kernel(
    x_ptr,
    out_ptr,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    lane = tl.arange(0, D)[None, :]
    place = tl.arange(0, N)[:, None] * ROW_DIM + lane
    x = tl.load(x_ptr + place, mask=lane < ROW_DIM, other=0.0)
    y = rounded(x, ROUNDING, KIND, ROW_DIM, NOPE, N, D)
    tl.store(out_ptr + place, y, mask=lane < ROW_DIM)


def _values(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Rows of all magnitudes; NaN, infinities and zeros among them."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(num_rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-40, 40, (num_rows, 1), generator=generator).float())
    # The bits of a NaN stored as bf16 are nobody's promise: none in the second half, where rotated channels are.
    x[1, ::3], x[1, 1 : width // 2 : 7], x[2] = torch.inf, torch.nan, 0
    return x.to(device)


def _constants(view: KVView) -> dict[str, int]:
    args = row_args(view)
    return {
        "KIND": args.kind,
        "ROW_DIM": args.row_dim,
        "NOPE": args.nope,
        "PLANE_ROWS": args.plane_rows,
        "D": next_pow2(args.row_dim),
    }


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("spare", [0, 64])
def test_a_kernel_writes_the_bytes_of_the_row_format(
    form: RowFormat, spare: int, device: torch.device
) -> None:
    table = guarded_view(form, NUM_ROWS, device, spare_columns=spare)
    other = guarded_view(form, NUM_ROWS, device, spare_columns=spare)
    rows = torch.tensor([10, 3, *NO_ROWS, NUM_ROWS, 0, 4, 5, 1, 2, 8, 9], device=device).int()
    x = _values(16, form.row_dim, device)
    back = torch.empty_like(x)
    args = row_args(table.view)
    before = table.rows()
    _store_kernel[(1,)](
        args.storage, args.stride, args.num_rows, rows[:16], x, back, N=16, **_constants(table.view)
    )
    other.view.write(rows[:16], x)
    for row in sorted(set(table.changed(before)) | set(other.changed(before))):
        ours, theirs = table.rows()[row], other.rows()[row]
        if ours.dtype.is_floating_point:
            ours, theirs = ours.nan_to_num(nan=-1.0), theirs.nan_to_num(nan=-1.0)
        assert same_bytes(ours, theirs), row
    wanted = form.round(x)
    assert torch.equal(back.isnan(), wanted.isnan())
    assert same_bytes(back.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("spare", [0, 64])
def test_a_kernel_reads_what_the_row_format_reads_and_zeros_where_no_row_is(
    form: RowFormat, spare: int, device: torch.device
) -> None:
    table = guarded_view(form, NUM_ROWS, device, spare_columns=spare)
    held = torch.tensor([7, 0, 10, 4], device=device)
    table.view.write(held, _values(4, form.row_dim, device).nan_to_num())
    rows = torch.cat([held, torch.tensor([*NO_ROWS, NUM_ROWS, NUM_ROWS + 1], device=device)])
    rows = torch.cat([rows, held]).int()
    args, constants = row_args(table.view), _constants(table.view)
    out = torch.full((16, constants["D"]), torch.nan, device=device)
    _load_kernel[(1,)](args.storage, args.stride, args.num_rows, rows, out, N=16, **constants)
    wanted = torch.zeros_like(out)
    wanted[:4, : form.row_dim] = wanted[12:, : form.row_dim] = table.view.read(held)
    assert same_bytes(out, wanted)


@pytest.mark.parametrize("value", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_rounding_in_a_kernel_is_the_references(
    rounding: Rounding, value: torch.dtype, device: torch.device
) -> None:
    form = PlainRows(value, 128 if rounding is Rounding.HADAMARD_FP4 else 76)
    view = KVView(torch.empty(form.storage_shape(1), dtype=value, device=device), 1, form)
    x = _values(8, form.row_dim, device)
    out = torch.empty_like(x)
    constants = _constants(view) | {"NOPE": 70}
    del constants["PLANE_ROWS"]
    _round_kernel[(1,)](x, out, ROUNDING=rounding_code(rounding), N=8, **constants)
    wanted = rounded_by_reference(
        x, rounding, rope_dim=form.row_dim - 70, value_dtype=value
    ).float()
    assert torch.equal(out.isnan(), wanted.isnan())
    assert same_bytes(out.nan_to_num(), wanted.nan_to_num())


def test_a_table_at_an_odd_address_is_refused(device: torch.device) -> None:
    form = PackedFp8Rows(76, 6)
    planes, nbytes = form.storage_shape(4)
    memory = torch.empty(planes * nbytes + 1, dtype=torch.uint8, device=device)
    view = KVView(memory[1:].view(planes, nbytes), 4, form)
    with pytest.raises(ConfigError, match="align the storage"):
        row_args(view)
