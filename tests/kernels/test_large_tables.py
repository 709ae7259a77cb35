"""On a GPU: rows behind the first 4 GiB of a table, where 32-bit offsets end."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.base import KernelSet, Rounding
from dsv4.kernels.triton_set import TritonKernels
from dsv4.metadata.plans import IndexStream, RopeTable, ScoreInputs, SelectOutput, Source
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, PackedFp8Rows, PlainRows, RowFormat
from dsv4.pool.geometry import PagedRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the memory of a GPU")

CUDA, GIB, DIM, HEADS, LANES = torch.device("cuda"), 2**30, 512, 64, 200
ROWS: dict[str, RowFormat] = {
    "fp32": PlainRows(torch.float32, DIM),
    "bf16": PlainRows(torch.bfloat16, DIM),
    "fp8": PackedFp8Rows(DIM, 64),
}
KEYS: dict[str, RowFormat] = {
    "bf16": PlainRows(torch.bfloat16, 128),
    "fp8": IndexFp8Rows(128),
    "fp4": IndexFp4Rows(128),
}


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    return TritonKernels.build(deterministic=False)


def large_table(row_format: RowFormat) -> KVView:
    """Uninitialised, 5 GiB and a little."""
    per_row = row_format.nbytes(64_000) / 64_000
    num_rows = int((5 * GIB) / per_row) + 7
    shape = row_format.storage_shape(num_rows)
    storage = torch.empty(shape, dtype=row_format.storage_dtype, device=CUDA)
    return KVView(storage, num_rows, row_format)


@pytest.mark.parametrize("name", ROWS)
def test_rows_behind_4_gib_are_stored_and_attended(kernels: KernelSet, name: str) -> None:
    view = large_table(ROWS[name])
    rows = view.num_rows - 1 - torch.randperm(5000, device=CUDA)[:LANES].int()
    values = torch.randn(LANES, DIM, device=CUDA).to(view.format.value_dtype)
    kernels.store.store_tail(values, tail_loc_T=rows, view=view)
    stored = view.format.round(values)
    assert torch.equal(view.read(rows.long()), stored)
    q = torch.randn(1, HEADS, DIM, device=CUDA)
    indptr = torch.tensor([0, LANES], dtype=torch.int32, device=CUDA)
    out = torch.full_like(q, torch.nan)
    sink = torch.randn(HEADS, device=CUDA)
    source = Source(view, IndexStream(indptr, rows, LANES))
    kernels.attend.attend(q, [source], sink, scale=DIM**-0.5, out_THD=out)
    scores = torch.cat([q[0].double() @ stored.double().T * DIM**-0.5, sink.double()[:, None]], 1)
    exact = scores.softmax(-1)[:, :-1] @ stored.double()
    assert (out[0] - exact).abs().max() < 1e-4 * exact.abs().max() + 1e-5


@pytest.mark.parametrize("name", KEYS)
def test_index_keys_behind_4_gib_are_scored_and_selected(kernels: KernelSet, name: str) -> None:
    view, per_page, entries = large_table(KEYS[name]), 64, 192
    last = view.num_rows // per_page - 1
    table = torch.tensor([[last, last - 5, last - 2]], dtype=torch.int32, device=CUDA)
    keys = PagedRows(block_table=table, rows_per_page=per_page, base=0)
    entry = torch.arange(entries, dtype=torch.int32, device=CUDA)
    rows = keys.rows(torch.zeros_like(entry), entry)
    values = torch.randn(entries, 128, device=CUDA)
    view.write(rows, values)
    q, weights = torch.randn(1, 64, 128, device=CUDA), torch.randn(1, 64, device=CUDA)
    rope = RopeTable(torch.ones(1, 32, device=CUDA), torch.zeros(1, 32, device=CUDA))
    read = kernels.score.queries(
        q.clone(), weights.clone(), rope=rope, rounding=Rounding.NONE, scale=1.0, view=view
    )
    inputs = ScoreInputs(
        view=view, keys=keys, slot_T=torch.zeros(1, dtype=torch.int32, device=CUDA),
        num_visible_T=torch.tensor([entries], dtype=torch.int32, device=CUDA), max_entries=entries,
        query_lengths=(1,), request_slots_B=torch.zeros(1, dtype=torch.int32, device=CUDA), tile_tokens=1,
    )  # fmt: skip
    scores = torch.full((1, entries), torch.nan, device=CUDA)
    kernels.score.score(*read, inputs, first_token=0, out_TN=scores)
    stored = view.format.round(values).double()
    exact = (q[0].double() @ stored.T).relu().T @ weights[0].double()
    limit = 0.05 if name == "fp8" else 1e-3  # fp8 keys: the queries are e4m3 too
    assert (scores[0] - exact).abs().max() < limit * exact.abs().max()
    indices = torch.full((16,), 2**31 - 1, dtype=torch.int32, device=CUDA)
    indptr = torch.tensor([0, 16], dtype=torch.int32, device=CUDA)
    output = SelectOutput(
        stream=IndexStream(indptr, indices, 16, final=False),
        scratch=torch.empty(4096, dtype=torch.int32, device=CUDA),
        lane_TK=torch.arange(16, dtype=torch.int32, device=CUDA)[None], rows=keys,
    )  # fmt: skip
    kernels.select.select(scores, inputs, output, first_token=0)
    best = scores[0].topk(16).indices.sort().values
    assert torch.equal(indices, rows[best])
