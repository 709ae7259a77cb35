"""Tables of random rows, and disjoint lists of rows for calls that must not share them.

Legend: T tokens, K rows a token reads, N lanes of a stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.metadata.plans import IndexStream, RopeTable
from dsv4.pool.base import KVView
from dsv4.pool.formats import RowFormat

BLOCK_ROWS = 1 << 16
"""Rows that are made; further ones repeat them. A multiple of any plane's rows."""


def random_table(row_format: RowFormat, num_rows: int, device: torch.device) -> KVView:
    """`num_rows` rows of normally distributed values, in whole blocks where there are several."""
    num_rows = num_rows if num_rows < BLOCK_ROWS else -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS
    shape = row_format.storage_shape(num_rows)
    view = KVView(torch.empty(shape, dtype=row_format.storage_dtype, device=device), num_rows, row_format)  # fmt: skip
    block = min(num_rows, BLOCK_ROWS)
    values = torch.randn(block, row_format.row_dim, device=device)
    view.write(torch.arange(block, dtype=torch.int32, device=device), values)
    if num_rows > block:
        step = row_format.storage_shape(block)[0]
        for start in range(step, view.storage.shape[0], step):
            view.storage[start : start + step] = view.storage[:step]
    return view


def shuffled_rows(num_rows: int, device: torch.device) -> Tensor:
    """int32 permutation: slices of it are lists without a common row."""
    return torch.randperm(num_rows, device=device).int()


def stream_of(rows_TK: Tensor) -> IndexStream:
    """Lists of equal lengths."""
    num_tokens, width = rows_TK.shape
    indptr = torch.arange(num_tokens + 1, dtype=torch.int32, device=rows_TK.device) * width
    return IndexStream(indptr, rows_TK.reshape(-1).contiguous(), width)


def random_rope(num_tokens: int, rope_dim: int, device: torch.device) -> RopeTable:
    """Any angles."""
    angle_TP = torch.rand(num_tokens, rope_dim // 2, device=device) * 6.283
    return RopeTable(angle_TP.cos(), angle_TP.sin())


def rotated64(x: Tensor, rope: RopeTable) -> Tensor:
    """float64 x [T, ..., D], its last channels turned as interleaved pairs."""
    half = rope.cos_TP.shape[1]
    shape = (rope.cos_TP.shape[0], *[1] * (x.dim() - 2), half)
    cos, sin = rope.cos_TP.double().view(shape), rope.sin_TP.double().view(shape)
    x = x.double().clone()
    turned = x[..., x.shape[-1] - 2 * half :]
    a, b = turned[..., 0::2].clone(), turned[..., 1::2].clone()
    turned[..., 0::2], turned[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return x


def normed64(x: Tensor, eps: float) -> Tensor:
    """float64 x over its root mean square."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
