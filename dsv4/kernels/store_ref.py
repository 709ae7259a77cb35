"""Store: norm and rotate queries and KV, round the KV, scatter it into the window ring.

Legend: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import Rounding, StoreKernel
from dsv4.kernels.rope_ref import rotate
from dsv4.metadata.plans import RopeTable
from dsv4.pool.base import KVView
from dsv4.quant import hadamard, round_fp4, round_fp8


def normed(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square, fp32 (fp64 stays fp64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def rounded(x: Tensor, rounding: Rounding, *, rope_dim: int, value_dtype: torch.dtype) -> Tensor:
    """The value that goes into a row: cast to the row's value dtype, then the official rounding."""
    x = x.to(value_dtype)
    if rounding is Rounding.FP8:
        nope = x.shape[-1] - rope_dim
        return torch.cat([round_fp8(x[..., :nope]), x[..., nope:]], dim=-1)
    if rounding is Rounding.HADAMARD_FP4:
        return round_fp4(hadamard(x))
    return x


class TorchStore(StoreKernel):
    def store(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        *,
        kv_norm: Tensor,
        eps: float,
        rope: RopeTable,
        store_loc_T: Tensor,
        view: KVView,
        rounding: Rounding,
        fresh_TD: Tensor | None,
    ) -> Tensor:
        # queries and KV share norm and rotation: one pass over [T, H + 1, D]
        heads = normed(torch.cat([q_THD, kv_TD.unsqueeze(1)], dim=1), eps)
        heads[:, -1] *= kv_norm
        heads = rotate(heads, rope)
        kv = heads[:, -1]
        rope_dim = 2 * rope.cos_TP.shape[-1]
        kv = rounded(kv, rounding, rope_dim=rope_dim, value_dtype=view.format.value_dtype)
        # packed rows may encode one value in two ways: store the bytes that a tail store of the fresh row would
        kv = view.format.round(kv)
        if fresh_TD is not None:
            fresh_TD.copy_(kv)
        view.write(store_loc_T, kv)
        return heads[:, :-1].to(q_THD.dtype)

    def store_tail(self, fresh_TD: Tensor, *, tail_loc_T: Tensor, view: KVView) -> None:
        view.write(tail_loc_T, fresh_TD)
