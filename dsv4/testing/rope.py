"""Conformance of a RopeKernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.kernels.base import RopeKernel
from dsv4.metadata.plans import RopeTable
from dsv4.testing import reference
from dsv4.testing.kernel_setup import KernelSetup, Randn, rope_table
from dsv4.testing.memory import same_bytes, strided

POSITIONS = [0, 1, 2, 77, 100_000]


def _expected(x: Tensor, rope: RopeTable, *, inverse: bool = False) -> Tensor:
    """Each vector rotated by the table's own angles, float64."""
    angles = torch.atan2(rope.sin_TP.double(), rope.cos_TP.double()).tolist()
    sign = -1 if inverse else 1
    heads = x.unsqueeze(1) if x.dim() == 2 else x
    rows = [
        [reference.rotated(h, [sign * a for a in angles[t]]) for h in token]
        for t, token in enumerate(heads.double().tolist())
    ]
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


class RopeConformance(KernelSetup[RopeKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8), (5, 1, 11), (5, 2, 6)])
    def test_1_rotates_interleaved_pairs_of_the_last_channels_and_passes_the_others(
        self, kernel: RopeKernel, randn: Randn, device: torch.device, shape: tuple[int, ...]
    ) -> None:
        """1. Rotates interleaved pairs of the last 2 P channels by each token's angle; the others pass unchanged."""
        rope = rope_table(POSITIONS, [1.0, 0.1, 0.003], device)
        x = randn(*shape)
        for given in (x, strided(x)):
            out = kernel.rotate(given, rope)
            self.close(out, _expected(x, rope))
            assert same_bytes(out[..., :-6], x[..., :-6])
        assert not torch.isnan(x).any(), "the input was overwritten"

    def test_1_no_tokens_are_rotated_to_no_tokens(
        self, kernel: RopeKernel, randn: Randn, device: torch.device
    ) -> None:
        """1. No tokens, no angles: the shape stays."""
        assert kernel.rotate(randn(0, 2, 8), rope_table([], [1.0], device)).shape == (0, 2, 8)

    def test_2_inverse_undoes_it(
        self, kernel: RopeKernel, randn: Randn, device: torch.device
    ) -> None:
        """2. `inverse` undoes it."""
        rope = rope_table(POSITIONS, [1.0, 0.1, 0.003], device)
        x = randn(5, 3, 10)
        self.close(kernel.rotate(x, rope, inverse=True), _expected(x, rope, inverse=True))
        self.close(kernel.rotate(kernel.rotate(x, rope), rope, inverse=True), x.cpu())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_3_arithmetic_is_fp32_or_wider_and_the_result_has_the_dtype_of_the_input(
        self, kernel: RopeKernel, randn: Randn, device: torch.device, dtype: torch.dtype
    ) -> None:
        """3. Arithmetic is fp32 (or the input's, if wider); the result has the input's dtype."""
        rope = rope_table(POSITIONS, [1.0, 0.1, 0.003], device)
        x = randn(5, 3, 8).to(dtype)
        out = kernel.rotate(x, rope)
        assert out.dtype == dtype
        # one rounding at the end, half a step of the dtype
        scale = 5 * 2.0**-8 / self.tolerance if dtype == torch.bfloat16 else 1.0
        self.close(out, _expected(x, rope), scale=scale)
