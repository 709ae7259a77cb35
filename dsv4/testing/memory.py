"""Memory that shows what should not have been read or written: poison, guard rows, odd strides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from dsv4.pool.base import KVPool, KVView
from dsv4.pool.formats import RowFormat

POISON: Mapping[torch.dtype, float | int] = {
    torch.uint8: 0x7F,
    torch.int32: 2**31 - 1,
    torch.int64: 2**31 - 1,
}
"""Fillers: an fp8 NaN (and, as a scale, 1), an index that is no row; NaN for every other dtype."""
GUARD_ROWS = 3


def poison_of(dtype: torch.dtype) -> float | int:
    """The filler of a dtype."""
    return POISON.get(dtype, math.nan)


def poisoned(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of poison."""
    return torch.full(tuple(shape), poison_of(dtype), dtype=dtype, device=device)


def tensor_bytes(tensor: Tensor) -> Tensor:
    """A copy of the bytes of a tensor of any strides, uint8 on the CPU: NaNs compare equal to themselves."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).clone() if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits."""
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(tensor_bytes(a), tensor_bytes(b))
    )


@frozen(eq=False)
class Guarded:
    """A tensor inside a larger poisoned one: guard rows in front and behind, and spare columns where it has rows."""

    whole: Tensor
    inner: Tensor
    rows: slice
    columns: slice

    def outside(self) -> Tensor:
        """Bytes of everything but the inner tensor."""
        masked = self.whole.clone()
        place = (self.rows, self.columns) if masked.dim() > 1 else (self.rows,)
        masked[place] = 0
        return tensor_bytes(masked)

    def intact(self) -> bool:
        """Whether the surroundings still hold poison alone."""
        untouched = poisoned(self.whole.shape, self.whole.dtype, self.whole.device)
        place = (self.rows, self.columns) if untouched.dim() > 1 else (self.rows,)
        untouched[place] = 0
        return torch.equal(self.outside(), tensor_bytes(untouched))


def guarded(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device, *, spare_columns: int = 0
) -> Guarded:
    """Poison inside and out. Spare columns make the row stride larger than the row."""
    rows, *rest = tuple(shape)
    width = [rest[0] + 2 * spare_columns] if rest else []
    whole = poisoned([rows + 2 * GUARD_ROWS, *width], dtype, device)
    inside = slice(GUARD_ROWS, GUARD_ROWS + rows)
    columns = slice(spare_columns, spare_columns + rest[0]) if rest else slice(None)
    inner = whole[inside, columns] if rest else whole[inside]
    return Guarded(whole, inner, inside, columns)


@frozen(eq=False)
class GuardedView:
    """A KVView over guarded memory; its rows start as poison."""

    view: KVView
    memory: Guarded

    def rows(self) -> Tensor:
        """The encodings of all rows, [num_rows, B]: what a row is, whatever plane it lies in."""
        every = torch.arange(self.view.num_rows, device=self.view.storage.device)
        return self.view.format.export_rows(self.view.storage, every).clone()

    def changed(self, before: Tensor) -> list[int]:
        """Rows whose bytes differ from what `rows()` gave before; fails if a byte around the table changed."""
        assert self.memory.intact(), "bytes outside the table were written"
        now = self.rows()
        return [row for row in range(now.shape[0]) if not same_bytes(now[row], before[row])]


def guarded_view(
    row_format: RowFormat, num_rows: int, device: torch.device, *, spare_columns: int = 0
) -> GuardedView:
    """A poisoned table of `num_rows` rows with guards around it."""
    memory = guarded(
        row_format.storage_shape(num_rows),
        row_format.storage_dtype,
        device,
        spare_columns=spare_columns,
    )
    return GuardedView(KVView(memory.inner, num_rows, row_format), memory)


def strided(tensor: Tensor) -> Tensor:
    """The same values behind strides that are not dense: every second row and column of a poisoned tensor."""
    last = tensor.shape[-1]
    wide = poisoned([*(2 * n for n in tensor.shape[:-1]), last + 3], tensor.dtype, tensor.device)
    place = (*(slice(1, None, 2) for _ in tensor.shape[:-1]), slice(2, 2 + last))
    wide[place] = tensor
    return wide[place]


def pool_bytes(pool: KVPool) -> dict[str, Tensor]:
    """The bytes of every tensor that the pool registers, by table."""
    return {part.table: tensor_bytes(part.storage) for part in pool.components()}


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Tables whose bytes differ."""
    return [name for name in a if not torch.equal(a[name], b[name])]
