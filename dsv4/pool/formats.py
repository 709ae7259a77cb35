"""Row formats: the bytes of one stored row, and the only code that writes or reads them.

A table has `num_rows` rows of `row_dim` values each. Byte layouts (source: design formats.md):

**Plain rows**, fp32 or bf16. Storage `[num_rows, row_dim]` of that dtype.

**Planar rows**. Storage uint8 `[num_planes, plane_nbytes]`. P = plane_rows rows share a plane, all
their data in front of all their scales; row j lies in plane `j // P` at `i = j % P`:

| part | offset in the plane | bytes |
|---|---|---|
| data of row i | `i * data_nbytes` | `data_nbytes` |
| scales of row i | `P * data_nbytes + i * scale_nbytes` | `scale_nbytes` |
| pad | `P * (data_nbytes + scale_nbytes)` | the rest of the plane |

| format | data of one row | scales of one row |
|---|---|---|
| packed fp8 | nope values e4m3, rope values bf16 | `ceil(nope / 64)` E8M0, padded to 8 n |
| index fp8 | d values e4m3 | one fp32 |
| index fp4 | d / 2 bytes of two e2m1, low nibble = even index | `ceil(d / 32)` E8M0 |

Multi-byte values are little-endian. A plane of packed fp8 is padded to a multiple of its data row,
so that data rows of all planes lie on one grid; the index formats have no pad.

| example | data | scales | P | plane |
|---|---|---|---|---|
| packed fp8, 448 + 64: the 584-byte row | 576 | 8 (7 used) | 64, 2, 1 | 37,440, 1,728, 1,152 |
| index fp8, 128: the 132-byte row | 128 | 4 | 64 | 8,448 |
| index fp4, 128: the 68-byte row | 64 | 4 | 64 | 4,352 |

Storages may be strided views (row or plane stride above the width, any storage offset); only the
last dim must be dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4.errors import ConfigError
from dsv4.pool.planar_rows import IndexFp4Rows, IndexFp8Rows, PackedFp8Rows, PlanarRows
from dsv4.pool.rows import PlainRows, RowFormat

if TYPE_CHECKING:
    from dsv4.config import ModelConfig

__all__ = [
    "IndexFp4Rows",
    "IndexFp8Rows",
    "PackedFp8Rows",
    "PlainRows",
    "PlanarRows",
    "RowFormat",
    "index_format",
    "row_format",
]


def row_format(name: str, model: ModelConfig) -> RowFormat:
    """Format of window and entry rows: auto, fp32, bf16 or fp8 (packed)."""
    if name == "fp8":
        return PackedFp8Rows(model.head_dim, model.qk_rope_head_dim)
    return _plain("row_format", name, model, model.head_dim, ("auto", "fp32", "bf16", "fp8"))


def index_format(name: str, model: ModelConfig) -> RowFormat:
    """Format of indexer keys: auto, fp32, bf16, fp8 (132 bytes per 128 values) or fp4 (68)."""
    if name == "fp8":
        return IndexFp8Rows(model.index_head_dim)
    if name == "fp4":
        return IndexFp4Rows(model.index_head_dim)
    return _plain(
        "index_format", name, model, model.index_head_dim, ("auto", "fp32", "bf16", "fp8", "fp4")
    )


def _plain(
    key: str, name: str, model: ModelConfig, row_dim: int, names: tuple[str, ...]
) -> PlainRows:
    if name == "auto":
        name = "fp32" if model.torch_dtype == "float32" else "bf16"
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"{key}: {name!r} is unknown; use one of {', '.join(names)}")
    return PlainRows(dtypes[name], row_dim)
