"""Rotary frequencies and the tables of one forward (spec/architecture.md 3.1)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from dsv4.config import YarnConfig
from dsv4.metadata.plans import RopeTable


@lru_cache(maxsize=64)
def inverse_frequencies(theta: float, rope_dim: int, yarn: YarnConfig | None) -> Tensor:
    """fp32 [rope_dim / 2] on the CPU: theta^(-2i/r), with YaRN stretched between its two correction dims.

    The attention factor is 1: cos and sin are not scaled.
    """
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    plain = 1.0 / (theta**exponent)
    if yarn is None:
        return plain

    def correction_dim(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
    high: float = min(math.ceil(correction_dim(yarn.beta_slow)), rope_dim - 1)
    if low == high:
        high += 0.001
    pair = torch.arange(rope_dim // 2, dtype=torch.float32)
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_table(positions_T: Tensor, frequencies_P: Tensor) -> RopeTable:
    """cos and sin of position * frequency, fp32."""
    angle_TP = positions_T.unsqueeze(1).float() * frequencies_P
    return RopeTable(torch.cos(angle_TP), torch.sin(angle_TP))
