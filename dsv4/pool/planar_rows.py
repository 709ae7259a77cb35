"""Block-planar formats of one byte storage; byte layouts are tabled in `dsv4.pool.formats`."""

# K rows of a call, D values of a row, B elements of one row's encoding

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from dsv4.errors import ConfigError
from dsv4.pool.rows import RowFormat
from dsv4.quant import (
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8,
    encode_e8m0,
    pack_fp4,
    quantize_fp4,
    quantize_fp8,
    unpack_fp4,
)

FP8_BLOCK = 64
"""Values per scale of a packed row: official, architecture.md 7.2."""
FP4_BLOCK = 32
"""Values per scale of an fp4 key: official, architecture.md 7.3."""
SCALE_ALIGN = 8
"""Scale bytes of a packed row are padded to this, so that every row's scales load as one word."""
PLANE_ROWS = 64


class PlanarRows(RowFormat):
    """Rows of uint8 data and scales, block-planar; subclasses say what the bytes mean."""

    @property
    @abstractmethod
    def data_nbytes(self) -> int: ...

    @property
    @abstractmethod
    def scale_nbytes(self) -> int: ...

    @property
    def plane_nbytes(self) -> int:
        return self.plane_rows * (self.data_nbytes + self.scale_nbytes)

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def storage_shape(self, num_rows: int) -> tuple[int, int]:
        return (-(-num_rows // self.plane_rows), self.plane_nbytes)

    def export_rows(self, storage: Tensor, rows_K: Tensor) -> Tensor:
        parts = []
        for offset, width in self._parts():
            units, index = self._units(storage, rows_K, offset, width)
            parts.append(units.index_select(0, index).view(-1, width))
        return torch.cat(parts, -1)

    def import_rows(self, storage: Tensor, rows_K: Tensor, encoded_KB: Tensor) -> None:
        start = 0
        for offset, width in self._parts():
            units, index = self._units(storage, rows_K, offset, width)
            part_KB = encoded_KB[:, start : start + width]
            units.index_copy_(0, index, part_KB.reshape(index.shape[0], units.shape[1]))
            start += width

    def _parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(offset in the plane, bytes per row) of data and scales."""
        return (0, self.data_nbytes), (self.plane_rows * self.data_nbytes, self.scale_nbytes)

    def _units(
        self, storage: Tensor, rows_K: Tensor, offset: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """The storage as a grid of units, [num_units, unit] bytes, and the units of each row.

        The unit is the widest that divides `width` and every start; in the usual layouts it is the
        row itself, so that moving a row is one memory copy.
        """
        num_planes, plane_stride = storage.shape[0], storage.stride(0)
        unit = math.gcd(width, offset, plane_stride)
        num_units = max(0, (num_planes - 1) * plane_stride + self.plane_nbytes) // unit
        units = storage.as_strided((num_units, unit), (unit, 1), storage.storage_offset())
        rows_K = rows_K.long()
        plane_K = rows_K // self.plane_rows
        row_units = width // unit
        index = (
            plane_K * (plane_stride // unit)
            + (rows_K - plane_K * self.plane_rows) * row_units
            + offset // unit
        )
        if row_units > 1:
            steps = torch.arange(row_units, device=index.device)
            index = (index.unsqueeze(-1) + steps).flatten()
        return units, index


def _reinterpret(part_KB: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as wider values. Always copied: a part may start at an odd address."""
    dense = part_KB.clone(memory_format=torch.contiguous_format).flatten().view(dtype)
    return dense.view(part_KB.shape[0], part_KB.shape[1] // dtype.itemsize)


@frozen
class PackedFp8Rows(PlanarRows):
    """KV rows `[nope | rope]`: e4m3 with an E8M0 scale per 64, then bf16. 448 + 64: 584 bytes."""

    head_dim: int = field(validator=ge(1))
    rope_dim: int = field(validator=ge(0))
    plane_rows: int = field(default=PLANE_ROWS, validator=ge(1))
    row_dim: int = field(init=False, repr=False)

    @row_dim.default
    def _row_dim(self) -> int:
        return self.head_dim

    def __attrs_post_init__(self) -> None:
        if self.rope_dim >= self.head_dim:
            raise ConfigError(
                f"packed fp8 rows: rope_dim {self.rope_dim} leaves nothing to quantise "
                f"of head_dim {self.head_dim}; "
                f"use bf16 rows"
            )

    @property
    def name(self) -> str:
        return "fp8"

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def num_scales(self) -> int:
        return -(-self.nope_dim // FP8_BLOCK)

    @property
    def data_nbytes(self) -> int:
        return self.nope_dim + 2 * self.rope_dim

    @property
    def scale_nbytes(self) -> int:
        return -(-self.num_scales // SCALE_ALIGN) * SCALE_ALIGN

    @property
    def plane_nbytes(self) -> int:
        payload = self.plane_rows * (self.data_nbytes + self.scale_nbytes)
        return -(-payload // self.data_nbytes) * self.data_nbytes

    def encode(self, values_KD: Tensor) -> Tensor:
        values_KD = values_KD.to(torch.bfloat16)
        nope, rope = values_KD[:, : self.nope_dim], values_KD[:, self.nope_dim :]
        codes, scale = quantize_fp8(nope, FP8_BLOCK)
        pad = scale.new_zeros(
            (scale.shape[0], self.scale_nbytes - self.num_scales), dtype=torch.uint8
        )
        return torch.cat(
            (codes.view(torch.uint8), rope.contiguous().view(torch.uint8), encode_e8m0(scale), pad),
            -1,
        )

    def decode(self, encoded_KB: Tensor) -> Tensor:
        codes = encoded_KB[:, : self.nope_dim]
        rope = _reinterpret(encoded_KB[:, self.nope_dim : self.data_nbytes], torch.bfloat16)
        scale = decode_e8m0(encoded_KB[:, self.data_nbytes : self.data_nbytes + self.num_scales])
        return torch.cat((dequantize_fp8(codes, scale, FP8_BLOCK), rope.float()), -1)


@frozen
class IndexFp8Rows(PlanarRows):
    """Indexer keys as e4m3 with one fp32 (power-of-two) scale per key: 132 bytes for 128 values."""

    row_dim: int = field(validator=ge(1))
    plane_rows: int = field(default=PLANE_ROWS, validator=ge(1))

    @property
    def name(self) -> str:
        return "fp8"

    @property
    def data_nbytes(self) -> int:
        return self.row_dim

    @property
    def scale_nbytes(self) -> int:
        return 4

    def encode(self, values_KD: Tensor) -> Tensor:
        codes, scale = quantize_fp8(values_KD.to(torch.bfloat16), self.row_dim)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1)

    def decode(self, encoded_KB: Tensor) -> Tensor:
        scale = _reinterpret(encoded_KB[:, self.row_dim :], torch.float32)
        return dequantize_fp8(encoded_KB[:, : self.row_dim], scale, self.row_dim)


@frozen
class IndexFp4Rows(PlanarRows):
    """Indexer keys as packed e2m1, one E8M0 scale per 32: 68 bytes for 128 values, as official."""

    row_dim: int = field(validator=ge(1))
    plane_rows: int = field(default=PLANE_ROWS, validator=ge(1))

    def __attrs_post_init__(self) -> None:
        if self.row_dim % 2:
            raise ConfigError(
                f"index fp4 rows: index_head_dim {self.row_dim} is odd; use another index_format"
            )

    @property
    def name(self) -> str:
        return "fp4"

    @property
    def data_nbytes(self) -> int:
        return self.row_dim // 2

    @property
    def scale_nbytes(self) -> int:
        return -(-self.row_dim // FP4_BLOCK)

    def encode(self, values_KD: Tensor) -> Tensor:
        codes, scale = quantize_fp4(values_KD.to(torch.bfloat16), FP4_BLOCK)
        return torch.cat((pack_fp4(codes), encode_e8m0(scale)), -1)

    def decode(self, encoded_KB: Tensor) -> Tensor:
        codes = unpack_fp4(encoded_KB[:, : self.data_nbytes])
        return dequantize_fp4(codes, decode_e8m0(encoded_KB[:, self.data_nbytes :]), FP4_BLOCK)
