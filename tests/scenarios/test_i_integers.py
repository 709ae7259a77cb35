"""Class I: addresses beyond 2^31 and lengths below 0."""

from __future__ import annotations

import pytest
import torch

from dsv4.metadata.plans import IndexStream, Source
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp8Rows, PlainRows, RowFormat
from tests.run_on import ops
from tests.scenarios import handmade
from tests.scenarios.catalogue import scenario

PAGES = 2**16 + 1


def huge(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Address space only: untouched pages cost no memory."""
    try:
        return torch.empty(numel, dtype=dtype)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space here")


@scenario("I", 33)
@pytest.mark.parametrize(
    "rows", [PlainRows(torch.bfloat16, 16), IndexFp8Rows(32)], ids=["plain", "planar"]
)
def test_a_row_whose_offset_needs_more_than_31_bits_reads_back(rows: RowFormat) -> None:
    """Page 2^16 at a stride of 2^16 bytes: row offsets of 4 GiB."""
    stride = 2**16 // rows.storage_dtype.itemsize
    storage = huge(PAGES * stride, rows.storage_dtype).as_strided(
        (PAGES, rows.storage_shape(rows.plane_rows)[1]), (stride, 1)
    )
    view = KVView(storage, PAGES * rows.plane_rows, rows)
    at = torch.tensor([0, 2**15, view.num_rows - 1], dtype=torch.int32)
    values = handmade.random(3, rows.row_dim).bfloat16().float()
    view.write(at, values)
    assert torch.equal(view.read(at), rows.round(values))


@scenario("I", 34)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_length_below_zero_reads_nothing(deterministic: bool) -> None:
    """A stream whose bounds run backwards, handed to the kernel directly."""
    view = handmade.table(handmade.random(8, 4))
    indices = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    made = Source(view, IndexStream(torch.tensor([2, 1, 3], dtype=torch.int32), indices, 4))
    q, sink = handmade.random(2, 3, 4), handmade.random(3)
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 3), torch.nan)
    kernel = ops(deterministic).attend
    kernel.attend(q, [made], sink, scale=0.5, out_THD=out, lse_TH=lse)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    expected, _ = handmade.attention(q[1:], [view.storage[[2, 3]]], sink, 0.5)
    torch.testing.assert_close(out[1:], expected, atol=1e-6, rtol=1e-6)
