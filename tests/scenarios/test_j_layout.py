"""Class J: one layout per component; strides, offsets and neighbours are respected by writers and readers."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import PoolConfig
from dsv4.metadata.plans import IndexStream, Source
from dsv4.pool.base import Region
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, PackedFp8Rows
from dsv4.pool.geometry import PoolGeometry
from tests.run_on import ops
from tests.scenarios import handmade
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, raw_bytes, truth
from tests.scenarios.weights import tiny_decoder

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code & 7]


@scenario("J", 35)
def test_a_key_of_132_bytes_lies_where_the_byte_table_says() -> None:
    """Three planes of 64 keys: all values of a plane, then all scales."""
    rows, values = IndexFp8Rows(128), handmade.random(192, 128)
    storage = torch.full(rows.storage_shape(192), 0x7F, dtype=torch.uint8)
    assert tuple(storage.shape) == (3, 64 * 132)
    rows.write(storage, torch.arange(192), values, num_rows=192)
    for key in (0, 1, 63, 64, 191):
        plane, i = storage[key // 64], key % 64
        codes = plane[128 * i : 128 * (i + 1)].view(torch.float8_e4m3fn).float()
        scale = plane[64 * 128 + 4 * i :][:4].clone().view(torch.float32)
        assert torch.equal(codes * scale, rows.read(storage, torch.tensor([key]))[0])
        assert (codes * scale - values[key]).abs().max() <= values[key].abs().max() / 16


@scenario("J", 35)
def test_a_key_of_68_bytes_lies_where_the_byte_table_says() -> None:
    rows, values = IndexFp4Rows(128), handmade.random(192, 128)
    storage = torch.full(rows.storage_shape(192), 0x7F, dtype=torch.uint8)
    rows.write(storage, torch.arange(192), values, num_rows=192)
    for key in (0, 1, 63, 64, 191):
        plane, i = storage[key // 64].tolist(), key % 64
        found = []
        for channel in range(128):
            byte = plane[64 * i + channel // 2]
            exponent = plane[64 * 64 + 4 * i + channel // 32]
            found.append(e2m1(byte >> 4 if channel % 2 else byte & 15) * 2.0 ** (exponent - 127))
        assert found == rows.read(storage, torch.tensor([key]))[0].tolist()


@scenario("J", 35)
def test_a_kv_row_of_584_bytes_lies_where_the_byte_table_says() -> None:
    rows, values = PackedFp8Rows(512, 64), handmade.random(192, 512)
    storage = torch.full(rows.storage_shape(192), 0x7F, dtype=torch.uint8)
    rows.write(storage, torch.arange(192), values, num_rows=192)
    for row in (0, 1, 63, 64, 191):
        plane, i = storage[row // 64], row % 64
        data = plane[576 * i : 576 * (i + 1)]
        scales = 2.0 ** (plane[64 * 576 + 8 * i :][:7].float() - 127)
        nope = data[:448].view(torch.float8_e4m3fn).float().view(7, 64) * scales.unsqueeze(1)
        rope = data[448:].clone().view(torch.bfloat16).float()
        read = rows.read(storage, torch.tensor([row]))[0]
        assert torch.equal(torch.cat([nope.flatten(), rope]), read)


@scenario("J", 36)
@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "fp4")])
def test_tables_of_wide_strides_give_the_bits_of_dense_ones(
    family: type[PoolConfig], formats: tuple[str, str]
) -> None:
    """Adopted tables at a storage offset, rows (or planes) three payloads apart."""
    decoder = tiny_decoder(kv_quant="official")
    ids, results = truth(64).ids, []
    for row_stride in (1, 3):
        session = Session(
            family,
            decoder,
            deterministic=True,
            row_stride=row_stride,
            row_format=formats[0],
            index_format=formats[1],
        )
        session.open_all(2)
        parts = [torch.cat(session.feed([(0, ids[:21]), (1, ids[3:40])]))]
        parts += [torch.cat(session.feed([(0, [7]), (1, [9])])) for _ in range(5)]
        results.append(torch.cat(parts))
        session.assert_guards_intact()
    assert torch.equal(*results)


@scenario("J", 37)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_page_has_a_row_per_entry_and_not_per_token(ratio: int) -> None:
    geometry = PoolGeometry(
        max_requests=2,
        window=128,
        in_place_tokens=1,
        ring_rows=128,
        page_tokens=256,
        pages_per_slot=4,
        num_pages=8,
    )
    assert geometry.rows_per_page(ratio) == 256 // ratio
    assert geometry.entry_rows(ratio) == 8 * (256 // ratio)
    assert geometry.index_row(ratio, 7, 4 * (256 // ratio) - 1) == geometry.entry_rows(ratio) - 1


@scenario("J", 37)
def test_the_bytes_of_a_pool_are_the_sum_of_its_rows(family: type[PoolConfig]) -> None:
    pool = Session(family, slots=3, depth=2, context=64).pool
    expected = {
        "window": 3 * 3 * 17 * 64 * 4,
        "entries": (6 * 8 + 6 * 2) * 64 * 4,
        "index": 6 * 8 * 32 * 4,
        "state": 3 * (9 * 4 * 64 + 2 * 2 * 64) * 4,
        "index_state": 3 * 9 * 4 * 32 * 4,
        "accumulator": 3 * (3 * 64 + 1) * 4,
        "books": 3 * (1 + 2) * 4,
    }
    assert sum(t.numel() * t.element_size() for t in pool.tensors.values()) == sum(
        expected.values()
    )
    assert pool.estimate(pool.config, pool.model).total == sum(expected.values())


@scenario("J", 38)
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_strided_indices_positions_and_slots_read_like_dense_ones(num_tokens: int) -> None:
    """Every second element of a wider tensor, in attend, select and store."""
    lists = [[(7 * t + k) % 50 for k in range(t % 5)] for t in range(num_tokens)]
    view, q = handmade.table(handmade.random(50, 8)), handmade.random(num_tokens, 2, 8, seed=1)
    dense = handmade.stream(lists, width=5)
    strided = IndexStream(apart(dense.indptr_T1), apart(dense.indices_N), 5)
    outs = [torch.empty_like(q), torch.empty_like(q)]
    for made, out in zip((dense, strided), outs, strict=True):
        ops().attend.attend(q, [Source(view, made)], torch.zeros(2), scale=1.0, out_THD=out)
    assert torch.equal(*outs)
    loc = torch.arange(num_tokens, dtype=torch.int32) % 50
    tables = [handmade.table(torch.zeros(50, 8)), handmade.table(torch.zeros(50, 8))]
    fresh = handmade.random(50, 8).repeat(2, 1)[: max(num_tokens, 1)]
    for where, target in zip((loc[:50], apart(loc[:50])), tables, strict=True):
        ops().store.store_tail(fresh, tail_loc_T=where, view=target)
    assert torch.equal(tables[0].storage, tables[1].storage)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of two."""
    wide = torch.full((2 * len(x),), -9, dtype=x.dtype)
    wide[::2] = x
    return wide[::2]


@scenario("J", 39)
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_a_narrowed_view_of_a_wide_buffer_is_read_by_its_strides(num_tokens: int) -> None:
    visible, width = [(3 * t) % 13 for t in range(num_tokens)], 12
    scores = handmade.random(num_tokens, 40)
    view = handmade.table(handmade.random(width, 4))
    found = []
    for given in (scores.narrow(1, 0, width), scores.narrow(1, 0, width).contiguous()):
        output = handmade.select_output(visible, 5, width)
        inputs = handmade.score_inputs(view, visible, width=width)
        ops().select.select(given, inputs, output, first_token=0)
        found.append(handmade.picks(output))
    assert found[0] == found[1]
    assert found[0] == [
        handmade.best(row.tolist(), n, 5) for row, n in zip(scores, visible, strict=True)
    ]


@scenario("J", 40)
@pytest.mark.parametrize("row_format", ["fp32", "fp8"])
def test_clearing_a_page_of_one_layer_changes_no_byte_beside_it(
    family: type[PoolConfig], row_format: str
) -> None:
    """Strided tables; the page in the middle. Planar rows of fp8 share planes with neighbour pages."""
    decoder = tiny_decoder(kv_quant="official")
    session = Session(family, decoder, row_stride=3, row_format=row_format)
    slots = session.open_all(4)
    session.feed([(slot, truth(64).ids) for slot in slots])
    component = next(c for c in session.pool.components() if c.name == "layer1.entries")
    assert component.format is not None
    page = 3
    rows = torch.tensor(component.rows_of_page(page))
    every = torch.arange(session.pool.view(1, Region.ENTRIES).num_rows)
    others = every[~torch.isin(every, rows)]
    kept = component.format.export_rows(component.storage, others).clone()
    tables = session.memory()
    component.format.zero_rows(component.storage, rows)
    assert not component.format.read(component.storage, rows).any()
    assert raw_bytes(component.format.export_rows(component.storage, others)) == raw_bytes(kept)
    for name, before in session.memory().items():
        assert (before == tables[name]) == (name != component.table)
    session.assert_guards_intact()
