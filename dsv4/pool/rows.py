"""What a row format promises, and the plain formats; layouts are tabled in `dsv4.pool.formats`."""

# K rows of a call, D values of a row, B elements of one row's encoding

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from dsv4.errors import ConfigError


class RowFormat(ABC):
    """How values become the bytes of a row. A format holds no memory; equal formats interchange.

    1. `read` gives fp32, and after `write` exactly `round` of what was written.
    2. `round` is idempotent.
    3. `write` touches the bytes of rows in [0, num_rows) and no others; other rows are skipped.
    4. `export_rows` then `import_rows` moves rows bit for bit, also between storages.
    5. No operation but `import_rows` of foreign bytes stores an fp8 NaN code.
    """

    row_dim: int
    plane_rows: int
    """Rows that share a plane; 1 where rows stand alone."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As in PoolConfig.row_format and index_format."""

    @property
    @abstractmethod
    def storage_dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def value_dtype(self) -> torch.dtype:
        """fp32 or bf16: values are first rounded to this; official quantisation starts from it."""

    @abstractmethod
    def storage_shape(self, num_rows: int) -> tuple[int, int]:
        """Shape of a storage with room for `num_rows` rows."""

    @abstractmethod
    def encode(self, values_KD: Tensor) -> Tensor:
        """[K, B] of storage_dtype: each row's encoding, independent of planes."""

    @abstractmethod
    def decode(self, encoded_KB: Tensor) -> Tensor:
        """fp32 [K, row_dim]."""

    @abstractmethod
    def export_rows(self, storage: Tensor, rows_K: Tensor) -> Tensor:
        """Encodings [K, B] of existing rows."""

    @abstractmethod
    def import_rows(self, storage: Tensor, rows_K: Tensor, encoded_KB: Tensor) -> None:
        """Store encodings into existing rows."""

    def nbytes(self, num_rows: int) -> int:
        """Bytes of a dense storage for `num_rows` rows."""
        return math.prod(self.storage_shape(num_rows)) * self.storage_dtype.itemsize

    def read(self, storage: Tensor, rows: Tensor) -> Tensor:
        """fp32 values [*rows.shape, row_dim]; every row must exist."""
        values_KD = self.decode(self.export_rows(storage, rows.reshape(-1)))
        return values_KD.view(*rows.shape, self.row_dim)

    def write(self, storage: Tensor, rows_K: Tensor, values_KD: Tensor, *, num_rows: int) -> None:
        """Encode and store values; rows outside [0, num_rows) write nothing.

        A row given twice needs equal values: which of them stays is not defined.
        """
        if rows_K.shape[0] == 0 or num_rows == 0:
            return
        encoded_KB = self.encode(values_KD)
        if rows_K.shape[0] == 1:
            target_K = rows_K.clamp(0, num_rows - 1)
            valid_K1 = (target_K == rows_K).unsqueeze(-1)
        else:
            target_K, source_K, valid_K1 = _redirect(rows_K, num_rows)
            encoded_KB = encoded_KB.index_select(0, source_K)
        # Needed only if no lane is valid, and then all lanes share one target.
        kept_1B = self.export_rows(storage, target_K[:1])
        self.import_rows(storage, target_K, torch.where(valid_K1, encoded_KB, kept_1B))

    def round(self, values: Tensor) -> Tensor:
        """What reading the stored values gives back: fp32, same shape."""
        return self.decode(self.encode(values.reshape(-1, self.row_dim))).view(values.shape)

    def zero_rows(self, storage: Tensor, rows_K: Tensor) -> None:
        """Make existing rows read as zeros."""
        self.import_rows(storage, rows_K, torch.zeros_like(self.export_rows(storage, rows_K)))

    def copy_rows(self, storage: Tensor, source_K: Tensor, target_K: Tensor) -> None:
        """Copy existing rows bit for bit; all sources are read before any target is written."""
        self.import_rows(storage, target_K, self.export_rows(storage, source_K))


def _redirect(rows_K: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row to write and lane to take it from, and whether there is anything to store ([K, 1]).

    Shapes do not depend on data: a lane without a row repeats the first lane that has one, so equal
    bytes are written twice. If no lane has a row, all keep the bytes of one row as they are.
    """
    target_K = rows_K.clamp(0, num_rows - 1)
    valid_K = target_K == rows_K
    lane_K = torch.arange(rows_K.shape[0], device=rows_K.device)
    source_K = torch.where(valid_K, lane_K, valid_K.byte().argmax())
    return target_K[source_K], source_K, valid_K[source_K].unsqueeze(-1)


@frozen
class PlainRows(RowFormat):
    """Rows of one floating dtype. Values are rounded to it and nothing else."""

    dtype: torch.dtype = field()
    row_dim: int = field(validator=ge(1))
    plane_rows: int = field(default=1, init=False)

    @dtype.validator
    def _check_dtype(self, _attribute: object, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"plain rows: dtype {dtype} is not supported; use torch.float32 or torch.bfloat16"
            )

    @property
    def name(self) -> str:
        return "fp32" if self.dtype == torch.float32 else "bf16"

    @property
    def storage_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        return self.dtype

    def storage_shape(self, num_rows: int) -> tuple[int, int]:
        return (num_rows, self.row_dim)

    def encode(self, values_KD: Tensor) -> Tensor:
        return values_KD.to(self.dtype)

    def decode(self, encoded_KB: Tensor) -> Tensor:
        return encoded_KB.float()

    def export_rows(self, storage: Tensor, rows_K: Tensor) -> Tensor:
        return storage.index_select(0, rows_K)

    def import_rows(self, storage: Tensor, rows_K: Tensor, encoded_KB: Tensor) -> None:
        storage.index_copy_(0, rows_K.long(), encoded_KB)
