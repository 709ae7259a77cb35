"""RoPE on the last channels of a vector, interleaved pairs (spec/architecture.md 3.1).

Legend: T tokens, P pairs. Pair (a, b) turns into (a cos - b sin, b cos + a sin).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.metadata.plans import RopeTable


def interleaved(rope: RopeTable, rank: int, *, inverse: bool) -> tuple[Tensor, Tensor]:
    """cos and signed sin, one value a channel, broadcasting over heads; made once per forward and form."""
    key = (rank, inverse)
    if key not in rope.derived:
        shape = (rope.cos_TP.shape[0],) + (1,) * (rank - 2) + (-1,)
        sin_TP = -rope.sin_TP if inverse else rope.sin_TP
        cos = torch.stack([rope.cos_TP, rope.cos_TP], -1).view(shape)
        rope.derived[key] = cos, torch.stack([-sin_TP, sin_TP], -1).view(shape)
    return rope.derived[key]


def rotate(x: Tensor, rope: RopeTable, *, inverse: bool = False) -> Tensor:
    """x [T, D] or [T, H, D] -> the same shape and dtype; arithmetic in fp32, or the input's dtype if wider."""
    if x.shape[0] == 0:
        return x
    cos, sin = interleaved(rope, x.dim(), inverse=inverse)
    width = cos.shape[-1]
    turned = x[..., -width:].to(torch.promote_types(x.dtype, torch.float32))
    swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = (turned * cos).add_(swapped * sin)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], dim=-1)
