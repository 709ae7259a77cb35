"""RoPE on the last channels of a vector, interleaved pairs (spec/architecture.md 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import RopeKernel
from dsv4.metadata.plans import RopeTable


class TorchRope(RopeKernel):
    def rotate(self, x: Tensor, rope: RopeTable, *, inverse: bool = False) -> Tensor:
        cos, sin = rope.cos_TP, rope.sin_TP
        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if inverse:
            sin = -sin
        width = 2 * rope.cos_TP.shape[-1]
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        a, b = out[..., -width::2], out[..., 1 - width :: 2] if width > 1 else out[..., 0:0]
        rotated_a, rotated_b = a * cos - b * sin, a * sin + b * cos
        a.copy_(rotated_a)
        b.copy_(rotated_b)
        return out.to(x.dtype)
