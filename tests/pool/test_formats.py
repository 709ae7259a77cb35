"""Row formats: bytes against hand tables and the golden quantiser output, and writes that touch nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import quant
from dsv4.errors import ConfigError
from dsv4.pool.formats import (
    IndexFp4Rows,
    IndexFp8Rows,
    PackedFp8Rows,
    PlainRows,
    RowFormat,
    index_format,
    row_format,
)

FORMATS: list[RowFormat] = [
    PlainRows(torch.float32, 40),
    PlainRows(torch.bfloat16, 40),
    PackedFp8Rows(512, 64),
    PackedFp8Rows(80, 16, 2),
    PackedFp8Rows(77, 6, 3),  # odd nope, so no row starts on a word
    PackedFp8Rows(600, 0, 1),
    IndexFp8Rows(128),
    IndexFp8Rows(33, 5),
    IndexFp4Rows(128),
    IndexFp4Rows(34, 3),
]
IDS = [str(i) + f.name + f"_{f.row_dim}_{f.plane_rows}" for i, f in enumerate(FORMATS)]
POISON = 0xFF  # NaN as fp32, bf16, e4m3 and E8M0

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=IDS)


def poisoned(fmt: RowFormat, num_rows: int) -> Tensor:
    shape = fmt.storage_shape(num_rows)
    nbytes = torch.full(
        (shape[0], shape[1] * fmt.storage_dtype.itemsize), POISON, dtype=torch.uint8
    )
    return nbytes.view(fmt.storage_dtype)


def values_of(fmt: RowFormat, count: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(count, fmt.row_dim, generator=gen) * torch.rand(count, 1, generator=gen) * 9


def rows_of(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def bytes_of(storage: Tensor) -> Tensor:
    return storage.contiguous().view(torch.uint8)


def payload(data: int, scales: int, plane_rows: int, plane: int, row: int) -> list[int]:
    """Byte offsets of a row in a block-planar table, from the table in formats.md."""
    start, i = row // plane_rows * plane, row % plane_rows
    return [
        *range(start + i * data, start + (i + 1) * data),
        *range(
            start + plane_rows * data + i * scales, start + plane_rows * data + (i + 1) * scales
        ),
    ]


@pytest.fixture(scope="module")
def primitives(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "quant" / "primitives.safetensors")


# Byte layouts. data, scales, plane rows, plane bytes: published sizes, see formats.md.


@pytest.mark.parametrize(
    ("plane_rows", "plane"), [(64, 37_440), (2, 1_728), (1, 1_152), (256, 149_760)]
)
def test_a_584_byte_row_lies_where_the_hand_table_says(
    primitives: dict[str, Tensor], plane_rows: int, plane: int
) -> None:
    fmt, x = PackedFp8Rows(512, 64, plane_rows), primitives["x"]
    codes, exponents = primitives["fp8_b64.codes"], primitives["fp8_b64.scale_e8m0"]
    rows = [130, 0, 63, 64, 129, 1]
    assert fmt.storage_shape(131) == (-(-131 // plane_rows), plane)
    storage = poisoned(fmt, 131)
    fmt.write(storage, rows_of(*rows), x.float(), num_rows=131)
    wanted = torch.full((storage.numel(),), POISON, dtype=torch.uint8)
    for lane, row in enumerate(rows):
        rope = x[lane, 448:].contiguous().view(torch.uint8)
        pad = torch.zeros(1, dtype=torch.uint8)
        encoded = torch.cat((codes[lane, :448], rope, exponents[lane, :7], pad))
        assert encoded.numel() == 584
        wanted[payload(576, 8, plane_rows, plane, row)] = encoded
    assert torch.equal(storage.flatten(), wanted)
    got = fmt.read(storage, rows_of(*rows))
    assert torch.equal(got[:, :448], primitives["fp8_b64.sim"][:, :448].float())
    assert torch.equal(got[:, 448:], x[:, 448:].float())


def test_a_68_byte_row_lies_where_the_hand_table_says(primitives: dict[str, Tensor]) -> None:
    fmt, x = IndexFp4Rows(128), primitives["x"][:, :128]
    codes, scale = primitives["fp4_b32.codes"], primitives["fp4_b32.scale_f32"]
    rows = [0, 1, 63, 64, 127, 190]
    storage = poisoned(fmt, 191)
    assert storage.shape == (3, 4_352)
    fmt.write(storage, rows_of(*rows), x, num_rows=191)
    wanted = torch.full((storage.numel(),), POISON, dtype=torch.uint8)
    for lane, row in enumerate(rows):
        nibbles = codes[lane, :128].tolist()
        data = [nibbles[2 * i] + 16 * nibbles[2 * i + 1] for i in range(64)]
        exponents = [int(v) + 127 for v in scale[lane, :4].log2().tolist()]
        wanted[payload(64, 4, 64, 4_352, row)] = torch.tensor(data + exponents, dtype=torch.uint8)
    assert torch.equal(storage.flatten(), wanted)
    assert torch.equal(
        fmt.read(storage, rows_of(*rows)), primitives["fp4_b32.sim"][:, :128].float()
    )


def test_a_132_byte_row_lies_where_the_hand_table_says(primitives: dict[str, Tensor]) -> None:
    fmt, x = IndexFp8Rows(128), primitives["x"][:, :128]
    codes, scale = primitives["fp8_b128.codes"], primitives["fp8_b128.scale_f32"]
    rows = [0, 1, 63, 64, 127, 190]  # three pages: first, second, last row, never interleaved
    storage = poisoned(fmt, 191)
    assert storage.shape == (3, 8_448)
    fmt.write(storage, rows_of(*rows), x, num_rows=191)
    wanted = torch.full((storage.numel(),), POISON, dtype=torch.uint8)
    for lane, row in enumerate(rows):
        encoded = torch.cat((codes[lane, :128], scale[lane, :1].contiguous().view(torch.uint8)))
        wanted[payload(128, 4, 64, 8_448, row)] = encoded
    assert torch.equal(storage.flatten(), wanted)
    wanted_values = primitives["fp8_b128.sim"][:, :128].float()
    assert torch.equal(fmt.read(storage, rows_of(*rows)), wanted_values)


@pytest.mark.parametrize(
    ("fmt", "num_rows", "nbytes"),
    [
        (PlainRows(torch.float32, 512), 7, 7 * 2_048),
        (PlainRows(torch.bfloat16, 512), 7, 7 * 1_024),
        (PackedFp8Rows(512, 64), 64, 37_440),
        (PackedFp8Rows(512, 64), 65, 2 * 37_440),
        (PackedFp8Rows(512, 64), 0, 0),
        (PackedFp8Rows(80, 16, 64), 1, 64 * 104 // 96 * 96 + 96),  # 64 + 32 data, 8 scales
        (IndexFp8Rows(128), 64, 8_448),
        (IndexFp4Rows(128), 65, 2 * 4_352),
        (IndexFp4Rows(32, 1), 3, 3 * 17),
    ],
)
def test_a_table_has_the_bytes_of_its_hand_table(
    fmt: RowFormat, num_rows: int, nbytes: int
) -> None:
    assert fmt.nbytes(num_rows) == nbytes
    storage = torch.empty(fmt.storage_shape(num_rows), dtype=fmt.storage_dtype)
    assert storage.numel() * storage.element_size() == nbytes


@every_format
def test_rows_never_share_a_byte_and_the_last_row_is_addressable(fmt: RowFormat) -> None:
    num_rows = 2 * fmt.plane_rows + 1
    owner = torch.zeros(fmt.nbytes(num_rows), dtype=torch.int32)
    for row in range(num_rows):
        storage = poisoned(fmt, num_rows)
        before = bytes_of(storage).clone()
        fmt.zero_rows(storage, rows_of(row))
        touched = (bytes_of(storage) != before).flatten()
        assert touched.any()
        owner += touched.int()
    assert owner.max() == 1


# Values.


@every_format
def test_a_read_gives_what_round_says_in_fp32(fmt: RowFormat) -> None:
    storage, values = poisoned(fmt, 70), values_of(fmt, 5)
    rows = rows_of(69, 0, 3, 64, 1)
    fmt.write(storage, rows, values, num_rows=70)
    got = fmt.read(storage, rows)
    assert got.dtype == torch.float32
    assert torch.equal(got, fmt.round(values))
    assert torch.equal(fmt.round(got), got)
    grid = rows_of(0, 69, 1, 3).view(2, 2)
    assert torch.equal(fmt.read(storage, grid), fmt.round(values)[[1, 0, 4, 2]].view(2, 2, -1))
    assert fmt.read(storage, rows_of()).shape == (0, fmt.row_dim)
    assert fmt.round(values.view(5, 1, -1).double()).dtype == torch.float32


@every_format
def test_what_official_rounding_gives_is_stored_exactly(fmt: RowFormat) -> None:
    """architecture.md 7.2 and 7.3: rounded values are exact in every format that can hold them."""
    values = values_of(fmt, 16, seed=3).bfloat16()
    values[0] = 0
    values[1] *= 1e-6
    values[2] *= 1e6
    if isinstance(fmt, PackedFp8Rows):
        nope = fmt.head_dim - fmt.rope_dim
        values = torch.cat((quant.round_fp8(values[:, :nope]), values[:, nope:]), -1)
    elif isinstance(fmt, IndexFp8Rows):
        values = quant.round_fp8(values, fmt.row_dim)
    else:
        values = quant.round_fp4(values)
    assert torch.equal(fmt.round(values), values.float())


def test_bf16_rows_and_packed_rows_hold_identical_official_values() -> None:
    packed, plain = PackedFp8Rows(512, 64), PlainRows(torch.bfloat16, 512)
    values = values_of(plain, 64, seed=9).bfloat16()
    values = torch.cat((quant.round_fp8(values[:, :448]), values[:, 448:]), -1)
    rows = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:64].int()
    read = []
    for fmt in (packed, plain):
        storage = poisoned(fmt, 100)
        fmt.write(storage, rows, values, num_rows=100)
        read.append(fmt.read(storage, rows))
    assert torch.equal(read[0], read[1])


def test_values_are_rounded_to_bf16_before_they_are_quantised() -> None:
    # 1.0625 + 2^-20 is above the middle of 1.0 and 1.125; rounded to bf16 first it is the tie, which goes to 1.0.
    values = torch.full((1, 80), 448.0)
    values[0, 1] = 1.0625 + 2.0**-20
    assert PackedFp8Rows(80, 16).round(values)[0, 1] == 1.0
    assert quant.round_fp8(values[:, :64])[0, 1] == 1.125


# Writes that touch nothing else.

OUTSIDE = [-1, -(2**31), 2**31 - 1, 40, 41]


@every_format
def test_rows_outside_the_table_write_nothing(fmt: RowFormat) -> None:
    """Rows 40.. exist in the storage as guards behind the table; -1 and INT_MIN, INT_MAX nowhere."""
    storage, values = poisoned(fmt, 80), values_of(fmt, len(OUTSIDE))
    fmt.write(storage, rows_of(*range(80)), values_of(fmt, 80, seed=5), num_rows=80)
    before = bytes_of(storage).clone()
    fmt.write(storage, rows_of(*OUTSIDE), values, num_rows=40)
    assert torch.equal(bytes_of(storage), before)
    for row in OUTSIDE:
        fmt.write(storage, rows_of(row), values[:1], num_rows=40)
        assert torch.equal(bytes_of(storage), before)


@every_format
@pytest.mark.parametrize("valid_row", [0, 17, 39])
def test_masked_lanes_leave_the_stored_lanes_and_the_guards_alone(
    fmt: RowFormat, valid_row: int
) -> None:
    rows = [*OUTSIDE, valid_row, -1, 2**31 - 1]
    lane = len(OUTSIDE)
    storage, values = poisoned(fmt, 80), values_of(fmt, len(rows), seed=6)
    fmt.write(storage, rows_of(*range(80)), values_of(fmt, 80, seed=5), num_rows=80)
    before = fmt.export_rows(storage, rows_of(*range(80)))
    fmt.write(storage, rows_of(*rows), values, num_rows=40)
    after = fmt.export_rows(storage, rows_of(*range(80)))
    changed = [row for row in range(80) if not torch.equal(before[row], after[row])]
    assert changed == [valid_row]
    assert torch.equal(fmt.read(storage, rows_of(valid_row)), fmt.round(values[lane : lane + 1]))


@every_format
def test_poison_stays_where_nothing_was_written(fmt: RowFormat) -> None:
    num_rows = 2 * fmt.plane_rows + 3
    rows = rows_of(-1, 1, 2 * fmt.plane_rows, -1)
    storage = poisoned(fmt, num_rows)
    fmt.write(storage, rows, values_of(fmt, 4), num_rows=num_rows)
    fmt.zero_rows(storage, rows[1:3])
    others = [r for r in range(num_rows) if r not in (1, 2 * fmt.plane_rows)]
    kept = fmt.export_rows(storage, rows_of(*others)).contiguous().view(torch.uint8)
    assert (kept == POISON).all()
    assert (fmt.read(storage, rows[1:3]) == 0).all()


@every_format
def test_equal_duplicates_store_their_value_once(fmt: RowFormat) -> None:
    storage, values = poisoned(fmt, 9), values_of(fmt, 1).expand(4, -1)
    fmt.write(storage, rows_of(5, 5, -1, 5), values, num_rows=9)
    assert torch.equal(fmt.read(storage, rows_of(5)), fmt.round(values[:1]))


@every_format
def test_a_write_of_no_lanes_or_into_an_empty_table_does_nothing(fmt: RowFormat) -> None:
    storage = poisoned(fmt, 3)
    fmt.write(storage, rows_of(), values_of(fmt, 0), num_rows=3)
    fmt.write(storage, rows_of(0), values_of(fmt, 1), num_rows=0)
    assert (bytes_of(storage) == POISON).all()
    empty = poisoned(fmt, 0)
    fmt.write(empty, rows_of(0, -1), values_of(fmt, 2), num_rows=0)
    assert fmt.read(empty, rows_of()).shape == (0, fmt.row_dim)


# Strided storage, raw moves.


@every_format
@pytest.mark.parametrize("extra", [0, 5])
def test_a_strided_view_works_like_a_dense_table(fmt: RowFormat, extra: int) -> None:
    """Planes (or rows) of three tables interleaved, storage offset one plane; `extra` breaks every alignment."""
    num_rows = 3 * fmt.plane_rows + 2
    planes, width = fmt.storage_shape(num_rows)
    whole = poisoned(fmt, 1).new_empty((planes, 3, width + extra))
    whole.view(torch.uint8).fill_(POISON)
    strided, dense = whole[:, 1, :width], poisoned(fmt, num_rows)
    rows = rows_of(0, num_rows - 1, fmt.plane_rows, -1, num_rows)
    values = values_of(fmt, 5, seed=8)
    for storage in (strided, dense):
        fmt.write(storage, rows, values, num_rows=num_rows)
        fmt.copy_rows(storage, rows_of(num_rows - 1), rows_of(1))
    assert torch.equal(bytes_of(strided), bytes_of(dense))
    assert torch.equal(fmt.read(strided, rows[:3]), fmt.read(dense, rows[:3]))
    for neighbour in (whole[:, 0], whole[:, 2], whole[:, 1, width:]):
        assert (bytes_of(neighbour) == POISON).all()


@every_format
def test_copied_rows_are_equal_bit_for_bit_and_sources_are_read_first(fmt: RowFormat) -> None:
    storage = poisoned(fmt, 70)
    gen = torch.Generator().manual_seed(4)
    bytes_of(storage).copy_(torch.randint(0, 256, bytes_of(storage).shape, generator=gen))
    before = fmt.export_rows(storage, rows_of(*range(70))).clone()
    fmt.copy_rows(storage, rows_of(2, 3, 69), rows_of(3, 2, 0))  # a swap, and a plane boundary
    after = fmt.export_rows(storage, rows_of(*range(70)))
    wanted = before.clone()
    wanted[[3, 2, 0]] = before[[2, 3, 69]]
    assert torch.equal(after.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("other_plane", [1, 2, 7, 64])
def test_exported_rows_fit_any_plane_size(other_plane: int) -> None:
    for fmt, other in (
        (PackedFp8Rows(512, 64), PackedFp8Rows(512, 64, other_plane)),
        (IndexFp4Rows(128), IndexFp4Rows(128, other_plane)),
    ):
        source, target = poisoned(fmt, 70), poisoned(other, 30)
        fmt.write(source, rows_of(69, 3), values_of(fmt, 2), num_rows=70)
        other.import_rows(target, rows_of(0, 29), fmt.export_rows(source, rows_of(69, 3)))
        assert torch.equal(other.read(target, rows_of(0, 29)), fmt.read(source, rows_of(69, 3)))


# Choice of format.


@pytest.mark.parametrize(
    ("dtype", "auto"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_auto_follows_the_dtype_of_the_model(dtype: str, auto: torch.dtype) -> None:
    model = SimpleNamespace(torch_dtype=dtype, head_dim=80, qk_rope_head_dim=16, index_head_dim=32)
    assert row_format("auto", model) == PlainRows(auto, 80)
    assert index_format("auto", model) == PlainRows(auto, 32)
    assert row_format("fp8", model) == PackedFp8Rows(80, 16)
    assert index_format("fp8", model) == IndexFp8Rows(32)
    assert index_format("fp4", model) == IndexFp4Rows(32)
    for choose in (row_format, index_format):
        assert [choose(name, model).name for name in ("fp32", "bf16", "fp8")] == [
            "fp32",
            "bf16",
            "fp8",
        ]


def test_a_component_has_one_format_and_an_unknown_one_raises() -> None:
    model = SimpleNamespace(
        torch_dtype="float32", head_dim=80, qk_rope_head_dim=80, index_head_dim=33
    )
    with pytest.raises(ConfigError, match="row_format: 'fp4'"):
        row_format("fp4", model)
    with pytest.raises(ConfigError, match="index_format: 'int8'"):
        index_format("int8", model)
    with pytest.raises(ConfigError, match="index_head_dim 33"):
        index_format("fp4", model)
    with pytest.raises(ConfigError, match="rope_dim 80"):
        row_format("fp8", model)
    with pytest.raises(ConfigError, match="float16"):
        PlainRows(torch.float16, 8)


def test_equal_formats_compare_equal_and_others_do_not() -> None:
    assert PackedFp8Rows(512, 64) == PackedFp8Rows(512, 64)
    assert PackedFp8Rows(512, 64) != PackedFp8Rows(512, 64, 2)
    assert PlainRows(torch.float32, 8) != PlainRows(torch.bfloat16, 8)
