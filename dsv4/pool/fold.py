"""The softmax pooling of a compressor as a fold over tokens: one step, and the only one.

    m'        = max(m, gate)
    sum'      = sum * exp(m - m') + exp(gate - m')
    weighted' = weighted * exp(m - m') + exp(gate - m') * value

An entry is `weighted / sum` after the last token of its window (spec/architecture.md 3.5). Because every path folds
in token order with this step, an entry has the same bits however its tokens arrived: one by one, in chunks, or from a
snapshot. The pool needs the step too, to bring an accumulator up to the length that it exports.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EMPTY_MAX = -math.inf
"""`max` of a fold that has seen no token; its sum and weighted sum are 0."""


def fold_step(
    max_C: Tensor, sum_C: Tensor, weighted_C: Tensor, gate_C: Tensor, value_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold one token into (max, sum, weighted sum), per channel.

    All tensors broadcast to one shape [..., channels], one floating dtype (fp32; fp64 in tests). `gate` includes `ape`.
    From the empty state (-inf, 0, 0) the result is exactly (gate, 1, value). A gate of -inf leaves the state as it is,
    to the last bit and whatever its value holds, so masked tokens may ride along.
    """
    new_max_C = torch.maximum(max_C, gate_C)
    # -inf - -inf would be NaN: the empty state and a masked token both weigh exactly nothing.
    keep_C = torch.where(max_C == EMPTY_MAX, 0.0, torch.exp(max_C - new_max_C))
    masked_C = gate_C == EMPTY_MAX
    take_C = torch.where(masked_C, 0.0, torch.exp(gate_C - new_max_C))
    new_weighted_C = torch.where(masked_C, weighted_C, weighted_C * keep_C + take_C * value_C)
    return new_max_C, sum_C * keep_C + take_C, new_weighted_C
