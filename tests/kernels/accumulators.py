"""Comparison of HCA accumulators, `max | sum | weighted sum | tokens folded` a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_accumulators(actual: Tensor, wanted: Tensor, rows: Sequence[int]) -> None:
    """Maxima and counts to the last bit, sums within the exponential's error."""
    dim = actual.shape[1] // 3
    for row in rows:
        assert torch.equal(actual[row, :dim], wanted[row, :dim])
        assert actual[row, -1] == wanted[row, -1]
        torch.testing.assert_close(actual[row, dim:-1], wanted[row, dim:-1], rtol=2e-5, atol=2e-6)
