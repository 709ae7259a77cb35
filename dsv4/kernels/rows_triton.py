"""Device functions that read and write rows of a KVView; the bytes are tabled in `dsv4.pool.formats`.

N rows of a tile, D lanes (both powers of two, D at least the row's width).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import ConfigError
from dsv4.kernels.base import Rounding
from dsv4.kernels.tile_triton import (
    cast,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    fp4_scale,
    fp8_scale,
    hadamard,
    round_bf16,
    round_fp4,
    round_fp8,
    scaled_fp4,
    scaled_fp8,
    spread,
    to_fp32,
)
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp4Rows, IndexFp8Rows, PackedFp8Rows, PlainRows, RowFormat

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
PACKED_FP8 = tl.constexpr(2)
INDEX_FP8 = tl.constexpr(3)
INDEX_FP4 = tl.constexpr(4)

NO_ROUNDING = tl.constexpr(0)
FP8_ROUNDING = tl.constexpr(1)
HADAMARD_FP4_ROUNDING = tl.constexpr(2)

FP8_BLOCK = tl.constexpr(64)
FP4_BLOCK = tl.constexpr(32)

_KIND: dict[str, int] = {
    "fp32": FP32.value,
    "bf16": BF16.value,
    "packed_fp8": PACKED_FP8.value,
    "index_fp8": INDEX_FP8.value,
    "index_fp4": INDEX_FP4.value,
}
_ROUNDING: dict[Rounding, int] = {
    Rounding.NONE: NO_ROUNDING.value,
    Rounding.FP8: FP8_ROUNDING.value,
    Rounding.HADAMARD_FP4: HADAMARD_FP4_ROUNDING.value,
}


class RowArgs(NamedTuple):
    """A KVView as kernels take it."""

    storage: Tensor
    """Typed as the kernels read it: fp32, bf16 or uint8."""
    stride: int
    """Elements from one row to the next; planar formats: bytes from one plane to the next."""
    num_rows: int
    kind: int
    """KIND of the device functions: FP32, BF16, PACKED_FP8, INDEX_FP8, INDEX_FP4."""
    row_dim: int
    nope: int
    """Channels in front of the rotated ones in a packed row; row_dim in the other formats."""
    plane_rows: int


def row_args(view: KVView) -> RowArgs:
    """Arguments of the device functions below. Raises ConfigError if a packed row's parts would be misaligned."""
    form, storage = view.format, view.storage
    kind = kind_of(form)
    nope = form.nope_dim if isinstance(form, PackedFp8Rows) else form.row_dim
    unit = 1
    if kind == PACKED_FP8.value and nope % 2 == 0:
        unit = 2
    elif kind == INDEX_FP8.value and form.plane_rows * form.row_dim % 4 == 0:
        unit = 4
    if storage.data_ptr() % unit or storage.stride(0) % unit:
        raise ConfigError(
            f"{form.name} rows: address {storage.data_ptr():#x} or plane stride {storage.stride(0)} is no multiple "
            f"of {unit} bytes; align the storage or use the torch kernels"
        )
    return RowArgs(
        storage, storage.stride(0), view.num_rows, kind, form.row_dim, nope, form.plane_rows
    )


def kind_of(form: RowFormat) -> int:
    """KIND of a row format."""
    if isinstance(form, PlainRows):
        return _KIND[form.name]
    for known, name in (
        (PackedFp8Rows, "packed_fp8"),
        (IndexFp8Rows, "index_fp8"),
        (IndexFp4Rows, "index_fp4"),
    ):
        if isinstance(form, known):
            return _KIND[name]
    raise ConfigError(
        f"row format {form.name}: {type(form).__name__} is unknown to the Triton kernels; "
        "use the torch kernels"
    )


def rounding_code(rounding: Rounding) -> int:
    """ROUNDING of `rounded`."""
    return _ROUNDING[rounding]


@triton.jit
def to_value(x, KIND: tl.constexpr):
    """fp32 rounded to the format's value dtype: fp32 rows as they are, all others bf16."""
    if KIND == FP32:
        return x
    return round_bf16(x)


@triton.jit
def rounded(
    x,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """What goes into a row: x in the format's value dtype, then the official rounding (fp8: of the first NOPE
    channels). Lanes behind ROW_DIM must be 0; HADAMARD_FP4 needs ROW_DIM == D."""
    x = to_value(x, KIND)
    if ROUNDING == FP8_ROUNDING:
        x = round_fp8(x, tl.arange(0, D)[None, :] < NOPE, N, D, FP8_BLOCK)
    if ROUNDING == HADAMARD_FP4_ROUNDING:
        tl.static_assert(ROW_DIM == D)
        x = round_fp4(to_value(hadamard(x, N, D), KIND), N, D)
    return x


@triton.jit
def stored(
    x,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """What reading the stored row gives back. Lanes behind ROW_DIM must be 0."""
    x = to_value(x, KIND)
    if KIND == PACKED_FP8:
        x = round_fp8(x, tl.arange(0, D)[None, :] < NOPE, N, D, FP8_BLOCK)
    if KIND == INDEX_FP8:
        x = round_fp8(x, tl.arange(0, D)[None, :] < ROW_DIM, N, D, D)
    if KIND == INDEX_FP4:
        x = round_fp4(x, N, D)
    return x


@triton.jit
def load_rows(
    ptr,
    stride,
    row,
    ok,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """fp32 [N, D] of rows [N]; 0 where not ok [N], and behind ROW_DIM. Only memory of rows that are ok is read."""
    lane = tl.arange(0, D)[None, :]
    if KIND < PACKED_FP8:
        place = row.to(tl.int64)[:, None] * stride + lane
        mask = ok[:, None] & (lane < ROW_DIM)
        return to_fp32(tl.load(ptr + place, mask=mask, other=0.0))
    data, scales = _parts(
        ptr,
        stride,
        row,
        _data_bytes(KIND, ROW_DIM, NOPE),
        _scale_bytes(KIND, ROW_DIM, NOPE),
        PLANE_ROWS,
    )
    if KIND == PACKED_FP8:
        return _load_packed(data, scales, ok, ROW_DIM, NOPE, N, D)
    if KIND == INDEX_FP8:
        code = tl.load(data + lane, mask=ok[:, None] & (lane < ROW_DIM), other=0)
        scale = _load_fp32(scales, ok, (PLANE_ROWS * ROW_DIM) % 4 == 0)
        return decode_e4m3(code.to(tl.int32)) * scale
    byte = tl.arange(0, D // 2)[None, :]
    pair = tl.load(data + byte, mask=ok[:, None] & (byte < ROW_DIM // 2), other=0).to(tl.int32)
    x = tl.reshape(tl.join(decode_e2m1(pair & 15), decode_e2m1(pair >> 4)), [N, D])
    return x * spread(_load_e8m0(scales, ok, ROW_DIM, FP4_BLOCK, D), N, D, FP4_BLOCK)


@triton.jit
def store_rows(
    ptr,
    stride,
    row,
    ok,
    x,
    KIND: tl.constexpr,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    PLANE_ROWS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Encode fp32 tiles [N, D] into rows [N], where ok [N]; no other byte is written."""
    lane = tl.arange(0, D)[None, :]
    mask = ok[:, None] & (lane < ROW_DIM)
    if KIND < PACKED_FP8:
        place = row.to(tl.int64)[:, None] * stride + lane
        tl.store(ptr + place, cast(x, ptr.dtype.element_ty), mask=mask)
    else:
        data, scales = _parts(
            ptr,
            stride,
            row,
            _data_bytes(KIND, ROW_DIM, NOPE),
            _scale_bytes(KIND, ROW_DIM, NOPE),
            PLANE_ROWS,
        )
        x = tl.where(lane < ROW_DIM, round_bf16(x), 0.0)
        if KIND == PACKED_FP8:
            _store_packed(data, scales, ok, x, ROW_DIM, NOPE, N, D)
        elif KIND == INDEX_FP8:
            scale = fp8_scale(x, lane < ROW_DIM, N, D, D)
            code = encode_e4m3(scaled_fp8(x, scale, N, D, D))
            tl.store(data + lane, code.to(tl.uint8), mask=mask)
            _store_fp32(scales, ok, scale, (PLANE_ROWS * ROW_DIM) % 4 == 0)
        else:
            scale = fp4_scale(x, lane < ROW_DIM, N, D, FP4_BLOCK)
            code = encode_e2m1(scaled_fp4(x, scale, N, D, FP4_BLOCK))
            low, high = tl.split(tl.reshape(code, [N, D // 2, 2]))
            byte = tl.arange(0, D // 2)[None, :]
            pair = (low | (high << 4)).to(tl.uint8)
            tl.store(data + byte, pair, mask=ok[:, None] & (byte < ROW_DIM // 2))
            block = tl.arange(0, D // FP4_BLOCK if D > FP4_BLOCK else 1)[None, :]
            there = ok[:, None] & (block * FP4_BLOCK < ROW_DIM)
            tl.store(scales + block, encode_e8m0(scale).to(tl.uint8), mask=there)


@triton.constexpr_function
def _data_bytes(kind, row_dim, nope):
    if kind == PACKED_FP8.value:
        return nope + 2 * (row_dim - nope)
    return row_dim if kind == INDEX_FP8.value else row_dim // 2


@triton.constexpr_function
def _scale_bytes(kind, row_dim, nope):
    if kind == PACKED_FP8.value:
        return -(-nope // 512) * 8
    return 4 if kind == INDEX_FP8.value else -(-row_dim // 32)


@triton.jit
def _parts(ptr, stride, row, DATA: tl.constexpr, SCALES: tl.constexpr, PLANE_ROWS: tl.constexpr):
    """Addresses [N, 1] of the rows' data and scales."""
    plane = row // PLANE_ROWS
    slot = row - plane * PLANE_ROWS
    base = ptr + plane.to(tl.int64)[:, None] * stride
    data = base + slot[:, None] * DATA
    scales = base + PLANE_ROWS * DATA + slot[:, None] * SCALES
    return data, scales


@triton.jit
def _load_e8m0(scales, ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    block = tl.arange(0, D // BLOCK if D > BLOCK else 1)[None, :]
    there = ok[:, None] & (block * BLOCK < WIDTH)
    return decode_e8m0(tl.load(scales + block, mask=there, other=127).to(tl.int32))


@triton.jit
def _load_packed(
    data,
    scales,
    ok,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    lane = tl.arange(0, D)[None, :]
    code = tl.load(data + lane, mask=ok[:, None] & (lane < NOPE), other=0)
    scale = _load_e8m0(scales, ok, NOPE, FP8_BLOCK, D)
    x = decode_e4m3(code.to(tl.int32)) * spread(scale, N, D, FP8_BLOCK)
    there = ok[:, None] & (lane >= NOPE) & (lane < ROW_DIM)
    if NOPE % 2 == 0:
        halves = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
        rope = to_fp32(tl.load(halves + (lane - NOPE), mask=there, other=0.0))
    else:
        # Behind an odd number of bytes no two-byte access is aligned.
        first = data + NOPE + 2 * (lane - NOPE)
        low = tl.load(first, mask=there, other=0).to(tl.int32)
        high = tl.load(first + 1, mask=there, other=0).to(tl.int32)
        rope = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    return tl.where(lane < NOPE, x, rope)


@triton.jit
def _store_packed(
    data,
    scales,
    ok,
    x,
    ROW_DIM: tl.constexpr,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    lane = tl.arange(0, D)[None, :]
    scale = fp8_scale(x, lane < NOPE, N, D, FP8_BLOCK)
    code = encode_e4m3(scaled_fp8(x, scale, N, D, FP8_BLOCK))
    tl.store(data + lane, code.to(tl.uint8), mask=ok[:, None] & (lane < NOPE))
    there = ok[:, None] & (lane >= NOPE) & (lane < ROW_DIM)
    if NOPE % 2 == 0:
        halves = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
        tl.store(halves + (lane - NOPE), cast(x, tl.bfloat16), mask=there)
    else:
        bits = x.to(tl.int32, bitcast=True)
        first = data + NOPE + 2 * (lane - NOPE)
        tl.store(first, (bits >> 16).to(tl.uint8), mask=there)
        tl.store(first + 1, (bits >> 24).to(tl.uint8), mask=there)
    # Padded to 8 bytes; the pad is written too, so that equal rows have equal bytes.
    blocks: tl.constexpr = D // FP8_BLOCK if D > FP8_BLOCK else 1
    padded: tl.constexpr = -(-NOPE // 512) * 8
    block = tl.arange(0, blocks)[None, :]
    byte = tl.where(block * FP8_BLOCK < NOPE, encode_e8m0(scale), 0)
    tl.store(scales + block, byte.to(tl.uint8), mask=ok[:, None] & (block < padded))
    if blocks < padded:
        pad = tl.arange(0, 8)[None, :]
        zero = tl.zeros([N, 8], tl.uint8)
        tl.store(scales + pad, zero, mask=ok[:, None] & (pad >= blocks))


@triton.jit
def _load_fp32(place, ok, ALIGNED: tl.constexpr):
    if ALIGNED:
        wide = place.to(tl.pointer_type(tl.float32))
        return tl.load(wide, mask=ok[:, None], other=0.0)
    bits = tl.load(place, mask=ok[:, None], other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(place + byte, mask=ok[:, None], other=0).to(tl.int32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_fp32(place, ok, x, ALIGNED: tl.constexpr):
    if ALIGNED:
        tl.store(place.to(tl.pointer_type(tl.float32)), x, mask=ok[:, None])
    else:
        bits = x.to(tl.int32, bitcast=True)
        for byte in tl.static_range(0, 4):
            tl.store(place + byte, (bits >> (8 * byte)).to(tl.uint8), mask=ok[:, None])
