"""Linear: torch's own GEMM, and the row-invariant one of deterministic mode.

torch's result for a row depends on how many rows stand beside it (GEMV against GEMM, tile edges). On the CPU a GEMM of
exactly 16 rows treats every row alike, so deterministic mode computes nothing but those.
Legend: T tokens, K inputs, O outputs, G groups.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from dsv4.kernels.base import LinearKernel

ROW_TILE = 16


class TorchLinear(LinearKernel):
    row_invariant: ClassVar[bool] = False

    def linear(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        return functional.linear(x_TK, weight_OK)

    def grouped(self, x_TGK: Tensor, weight_GOK: Tensor) -> Tensor:
        return torch.bmm(x_TGK.transpose(0, 1), weight_GOK.transpose(1, 2)).transpose(0, 1)


class TiledLinear(LinearKernel):
    """Fixed tiles of 16 rows, the last one padded with zeros."""

    row_invariant: ClassVar[bool] = True

    def linear(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        num_rows = x_TK.shape[0]
        num_tiles = -(-num_rows // ROW_TILE)
        padded = x_TK.new_zeros(num_tiles * ROW_TILE, x_TK.shape[1])
        padded[:num_rows] = x_TK
        out = x_TK.new_empty(num_tiles * ROW_TILE, weight_OK.shape[0])
        transposed = weight_OK.t()
        for tile in range(num_tiles):
            rows = slice(tile * ROW_TILE, (tile + 1) * ROW_TILE)
            torch.mm(padded[rows], transposed, out=out[rows])
        return out[:num_rows]

    def grouped(self, x_TGK: Tensor, weight_GOK: Tensor) -> Tensor:
        return torch.stack(
            [self.linear(x_TGK[:, g], weight) for g, weight in enumerate(weight_GOK)], dim=1
        )
