"""What attend launches: segments that one kernel walks over, tile shapes, and how far rows are split.

Legend: T tokens, H heads, D head dim. Everything here follows from capacities and formats, nothing from device data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from attrs import frozen
from torch import Tensor

from dsv4.kernels.attend_tiles_triton import FRESH_BY_ADDRESS, FRESH_BY_LOAD, NO_FRESH
from dsv4.kernels.rows_triton import FP32, PACKED_FP8, RowArgs, row_args
from dsv4.metadata.buffers import MAX_SPLITS
from dsv4.metadata.plans import IndexStream, Source
from dsv4.triton_launch import interpreting

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities, from Hopper on with products of 64 heads at once and with dependent launches."""
H200_PROCESSORS = 132
SPLIT_US, PART_US = 1.0, 0.06 / 64
"""What splitting takes: once, and for each part of a token and head. Times are of an H200, fitted to what whole and
split calls of 1 to 128 tokens took."""


@frozen
class Tile:
    """What one program works on at a time, and how."""

    heads: int
    rows: int
    num_warps: int
    num_stages: int = 1
    eager: bool = False
    """Request the next tile's rows before this tile's products."""
    spread: bool = False
    """Spread the scores over the warpgroups, see `fold_tile`."""
    plain_us: tuple[float, float] = (6.5, 3.1)
    """Time of a program without tiles, and of each tile of plain rows."""
    packed_us: tuple[float, float] = (7.3, 3.8)
    """The same of packed rows."""

    def time_us(self, num_tiles: int, *, packed: bool) -> float:
        """Of programs that run side by side."""
        start, tile = self.packed_us if packed else self.plain_us
        return start + num_tiles * tile


WIDE = Tile(64, 64, 8, num_stages=2, eager=True, spread=True)
"""wgmma takes 64 heads. Shared memory: q 64 KB, two tiles of 64 rows of 1 KB; the sums fill half the registers."""
TENSOR_MEMORY = Tile(64, 32, 8, num_stages=3, eager=True)
"""Blackwell keeps the sums in memory of their own; 64 rows would spill registers."""
NARROW = Tile(16, 32, 4, plain_us=(3.3, 2.1), packed_us=(4.3, 3.2))
"""Parts of one tile, and GPUs without wgmma: 82 KB on NVIDIA, 32 KB on AMD."""
FEW = Tile(16, 32, 4, num_stages=2, eager=True, plain_us=(4.0, 1.5), packed_us=(4.9, 2.7))
"""Few tokens. As with NARROW, each group of heads gathers and unpacks the same rows again, which pays while processors
are idle. Registers spill, yet waiting for each tile's rows takes longer, from two tiles on."""
LONG = Tile(16, 16, 8)
"""Rows of more than 512 channels."""
EXACT = Tile(16, 16, 4)
"""fp32 products: unrolled multiply-adds."""


@frozen(eq=False)
class Segment:
    """A source as kernels take it."""

    rows: RowArgs
    fresh_TD: Tensor | None
    stream: IndexStream

    @classmethod
    def of(cls, source: Source) -> Segment:
        return cls(row_args(source.view), source.fresh_TD, source.stream)

    @property
    def num_fresh(self) -> int:
        return 0 if self.fresh_TD is None else self.fresh_TD.shape[0]

    @property
    def empty(self) -> bool:
        return self.stream.max_rows == 0 or self.rows.num_rows + self.num_fresh == 0

    def args(self, fresh_TD: Tensor) -> tuple[Tensor | int, ...]:
        """Arguments of the kernel; `fresh_TD` stands for the fresh rows of a segment that has none."""
        fresh_TD = fresh_TD if self.fresh_TD is None else self.fresh_TD
        return (
            *self.rows[:3], fresh_TD, fresh_TD.stride(0), self.num_fresh,
            self.stream.indptr_T1, self.stream.indices_N,
        )  # fmt: skip


@frozen(eq=False)
class Launch:
    """One or two segments of one row format."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> RowArgs:
        """Of the first segment; format and row width are those of all."""
        return self.segments[0].rows

    @property
    def _fresh(self) -> list[Tensor]:
        return [s.fresh_TD for s in self.segments if s.fresh_TD is not None]

    def takes(self, segment: Segment) -> bool:
        """Whether a second segment can be walked over in the same launch."""
        a, b = self.rows, segment.rows
        alike = (a.kind, a.nope, a.plane_rows) == (b.kind, b.nope, b.plane_rows)
        dtypes = {x.dtype for x in (*self._fresh, segment.fresh_TD) if x is not None}
        return len(self.segments) == 1 and alike and len(dtypes) <= 1

    @property
    def packed(self) -> bool:
        return bool(self.rows.kind == PACKED_FP8.value)

    @property
    def fresh_mode(self) -> int:
        """How fresh rows are read."""
        if not self._fresh:
            return int(NO_FRESH.value)
        alike = self._fresh[0].dtype == self.rows.storage.dtype
        return int((FRESH_BY_ADDRESS if alike else FRESH_BY_LOAD).value)

    @property
    def same_table(self) -> bool:
        """Whether all segments read one table: its place need not be chosen tile by tile."""
        a, b = self.segments[0].rows, self.segments[-1].rows
        same_memory = a.storage.data_ptr() == b.storage.data_ptr()
        return same_memory and a[1:] == b[1:]

    @property
    def published(self) -> bool:
        """Whether packed rows have the published form: up to 8 whole blocks of codes and one block of rotated
        channels, on a grid of 16 bytes."""
        a = self.rows
        form = a.nope % 64 == 0 and 0 < a.nope <= 512 and a.row_dim - a.nope == 64
        return self.packed and form and self.aligned

    @property
    def aligned(self) -> bool:
        """Whether every row, or plane of packed rows, starts at a multiple of 16 bytes."""
        tensors = [s.rows.storage for s in self.segments] + self._fresh
        return all(
            x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors
        )

    def num_tiles(self, rows: int) -> int:
        """Most tiles of a token."""
        return sum(-(-s.stream.max_rows // rows) for s in self.segments)

    def args(self) -> tuple[Tensor | int, ...]:
        """Both segments' arguments; a lone one's are given twice."""
        fresh_TD = (*self._fresh, self.rows.storage)[0]
        return self.segments[0].args(fresh_TD) + self.segments[-1].args(fresh_TD)


def launches_of(sources: Sequence[Source]) -> list[Launch]:
    """Sources without rows dropped, neighbours of one format in pairs."""
    launches: list[Launch] = []
    for segment in map(Segment.of, sources):
        if segment.empty:
            continue
        if launches and launches[-1].takes(segment):
            launches[-1] = Launch((*launches[-1].segments, segment))
        else:
            launches.append(Launch((segment,)))
    return launches


@frozen
class Plan:
    """How a call runs. Parts of a token: `parts` in each of the launches."""

    tile: Tile
    exact: bool
    """fp32 products; bf16 otherwise."""
    parts: int = 1


def plan(q_THD: Tensor, launches: Sequence[Launch], scratch: Tensor | None) -> Plan:
    """The fastest by what tiles and parts take. `scratch`: fp32 memory for partial results; without it no row is split
    and the tile is the same for all calls."""
    num_tokens, num_heads, dim = q_THD.shape
    exact = q_THD.dtype == torch.float32 or any(x.rows.kind == FP32.value for x in launches)
    tile = tile_for(dim, num_heads, q_THD.device, exact=exact)
    if scratch is None or len(launches) > 1:
        return Plan(tile, exact)
    most = min(MAX_SPLITS, scratch.numel() // (num_tokens * num_heads * (dim + 2)))
    rows, packed = num_tokens * num_heads, launches[0].packed
    best = math.inf, Plan(tile, exact)
    for candidate in (NARROW, FEW, tile) if tile in (WIDE, TENSOR_MEMORY) else (tile,):
        programs = num_tokens * -(-num_heads // candidate.heads)
        side_by_side = processors(q_THD.device) // programs
        if side_by_side == 0:
            continue
        tiles, limit = launches[0].num_tiles(candidate.rows), max(1, min(side_by_side, most))
        time, parts = fastest_split(candidate, tiles, rows, limit, packed=packed)
        if time < best[0]:
            best = time, Plan(candidate, exact, parts)
    return best[1]


@lru_cache(4096)
def fastest_split(
    tile: Tile, num_tiles: int, num_rows: int, most: int, *, packed: bool
) -> tuple[float, int]:
    """(us, parts) of up to `most` parts whose programs all run side by side; `num_rows`: tokens times heads."""
    times = []
    for share in range(-(-num_tiles // most), num_tiles + 1):
        parts = -(-num_tiles // share)
        combining = SPLIT_US + PART_US * num_rows * parts if parts > 1 else 0.0
        times.append((tile.time_us(share, packed=packed) + combining, parts))
    return min(times)


def tile_for(dim: int, num_heads: int, device: torch.device, *, exact: bool) -> Tile:
    """Tile shape where rows are not split, whatever their format and the number of tokens."""
    if dim > 512:
        return LONG
    if exact:
        return EXACT
    if num_heads <= 32 or _capability(device) < HOPPER:
        return NARROW
    return WIDE if _capability(device) < BLACKWELL else TENSOR_MEMORY


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU; (0, 0) of others. The interpreter takes the shapes of an H200."""
    if interpreting():
        return HOPPER
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """Wide programs that run side by side."""
    if device.type != "cuda":
        return H200_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
