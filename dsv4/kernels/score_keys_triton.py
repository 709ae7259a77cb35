"""Device functions that bring a tile of paged indexer keys to a product.

Legend: N keys of a tile, from entry `start` on; D lanes of a key; RPP rows of a page; BASE row of page 0.

RUNS says into how many runs of neighbouring rows a tile falls: 1, 2 (halves), or 0 = each key is looked up by itself.
WHOLE says that page p is plane p. An entry that has no row reads row 0 and is masked when its score is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.rows_triton import PACKED_FP8, load_rows
from dsv4.kernels.tile_triton import cast, to_fp32


@triton.jit
def key_pages(table_ptr, start, num_pages, RUNS: tl.constexpr, RPP: tl.constexpr, N: tl.constexpr):
    """Pages of the first and the last run, or (RUNS 0) of each key and a number that nobody reads."""
    if RUNS == 0:
        index = (start + tl.arange(0, N)) // RPP
        last = start
    else:
        index = start // RPP
        last_index = (start + (N - N // RUNS)) // RPP
        last = tl.load(table_ptr + last_index, mask=last_index < num_pages, other=-1)
    page = tl.load(table_ptr + index, mask=index < num_pages, other=-1)
    return page, last


@triton.jit
def _locate(
    page, entry, num_rows,
    RPP: tl.constexpr, BASE: tl.constexpr, PLANE_ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(plane, row of the plane, whether the entry has a row); a plain row is a plane of its own."""
    ok = (page >= 0) & (page < (num_rows - BASE + RPP - 1) // RPP)
    page = tl.where(ok, page, 0)
    if WHOLE:
        plane = page
        place = entry % RPP
    else:
        row = BASE + page * RPP + entry % RPP
        ok = ok & (row < num_rows)
        row = tl.where(ok, row, 0)
        plane = row // PLANE_ROWS
        place = row - plane * PLANE_ROWS
    return plane, place, ok


@triton.jit
def _locate_all(
    page, last, start, num_rows,
    RUNS: tl.constexpr, RPP: tl.constexpr, BASE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`_locate` of each key, [N]."""
    lane = tl.arange(0, N)
    if RUNS > 0:
        page = tl.where(lane < N // RUNS, page, last)
    return _locate(page, start + lane, num_rows, RPP, BASE, PLANE_ROWS, WHOLE)


@triton.jit
def keys_exist(
    page, last, start, num_rows,
    RUNS: tl.constexpr, RPP: tl.constexpr, BASE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Which entries have a row, [N]."""
    _, _, ok = _locate_all(
        page, last, start, num_rows, RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N
    )  # fmt: skip
    return ok


@triton.jit
def _places(
    page, last, start, num_rows, stride, DATA: tl.constexpr,
    RUNS: tl.constexpr, RPP: tl.constexpr, BASE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Elements from the table's start to each key, [N]; ALIGN divides them all."""
    if RUNS == 0:
        plane, place, _ = _locate_all(
            page, last, start, num_rows, RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N
        )  # fmt: skip
        key = plane.to(tl.int64) * stride + place * DATA
    else:
        # Two addresses in all: the rest is the distance from a run's first key.
        SPAN: tl.constexpr = N // RUNS
        FIRST: tl.constexpr = RPP // SPAN  # runs of a page; with one, each run starts its page
        entry = 0 if FIRST == 1 else start
        plane, place, _ = _locate(page, entry, num_rows, RPP, BASE, PLANE_ROWS, WHOLE)
        lane = tl.arange(0, N)
        step = stride if PLANE_ROWS == 1 else DATA
        key = plane.to(tl.int64) * stride + place * DATA
        if RUNS == 2:
            entry = 0 if FIRST == 1 else start + SPAN
            plane, place, _ = _locate(last, entry, num_rows, RPP, BASE, PLANE_ROWS, WHOLE)
            key = tl.where(lane < SPAN, key, plane.to(tl.int64) * stride + place * DATA)
        key += lane % SPAN * step
    return tl.multiple_of(key, ALIGN)


@triton.jit
def operand(x, DOT: tl.constexpr):
    """A loaded tile as a product takes it; untouched where it can be: then copies need not pass the registers."""
    if x.dtype != DOT:
        x = cast(to_fp32(x), DOT)
    return x


@triton.jit
def load_keys(
    keys_ptr, page, last, start, num_rows, stride,
    KIND: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr, DIM: tl.constexpr,
    RUNS: tl.constexpr, RPP: tl.constexpr, BASE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys [N, D] in DOT; NATIVE: e4m3, short of their scales."""
    if NATIVE or KIND < PACKED_FP8:
        key = _places(
            page, last, start, num_rows, stride, DIM,
            RUNS, RPP, BASE, PLANE_ROWS, WHOLE, ALIGN, N,
        )  # fmt: skip
        lane = tl.arange(0, D)[None, :]
        typed = keys_ptr.to(tl.pointer_type(tl.float8e4nv)) if NATIVE else keys_ptr
        # Channels alone are masked, and only if some are missing: NaNs of a key stay in its own score.
        if DIM == D:
            x = tl.load(typed + key[:, None] + lane)
        else:
            x = tl.load(typed + key[:, None] + lane, mask=lane < DIM, other=0.0)
        if not NATIVE:
            x = operand(x, DOT)
    else:
        plane, place, ok = _locate_all(
            page, last, start, num_rows, RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N
        )  # fmt: skip
        row = plane * PLANE_ROWS + place
        x = cast(load_rows(keys_ptr, stride, row, ok, KIND, DIM, DIM, PLANE_ROWS, N, D), DOT)
    return x


@triton.jit
def load_scales(
    keys_ptr, page, last, start, num_rows, stride, DIM: tl.constexpr,
    RUNS: tl.constexpr, RPP: tl.constexpr, BASE: tl.constexpr, PLANE_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The fp32 scales behind a plane's keys, [N]."""
    plane, place, _ = _locate_all(
        page, last, start, num_rows, RUNS, RPP, BASE, PLANE_ROWS, WHOLE, N
    )  # fmt: skip
    scale = plane.to(tl.int64) * stride + (PLANE_ROWS * DIM + place * 4)
    return tl.load((keys_ptr + scale).to(tl.pointer_type(tl.float32)))
