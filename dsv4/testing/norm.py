"""Conformance of a NormKernel."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.base import NormKernel
from dsv4.testing import reference
from dsv4.testing.kernel_setup import KernelSetup, Randn
from dsv4.testing.memory import same_bytes, strided


class NormConformance(KernelSetup[NormKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 24), (3, 4, 80), (2, 513)])
    def test_1_rows_are_divided_by_their_root_mean_square_and_weighted(
        self, kernel: NormKernel, randn: Randn, shape: tuple[int, ...]
    ) -> None:
        """1. x / sqrt(mean(x^2) + eps) * weight in fp32."""
        x, weight = randn(*shape), randn(shape[-1])
        rows = x.double().flatten(0, -2).tolist()
        wanted = [reference.rms_normed(row, 1e-3, weight.double().tolist()) for row in rows]
        for given in (x, strided(x)):
            out = kernel.norm(given, weight, 1e-3)
            assert out.dtype == torch.float32
            self.close(out, torch.tensor(wanted, dtype=torch.float64).view(shape), scale=5)

    def test_1_the_one_cast_is_at_the_end(self, kernel: NormKernel, randn: Randn) -> None:
        """1. In bf16 the result is the fp32 result, rounded once."""
        x, weight = randn(7, 96).bfloat16(), randn(96)
        out = kernel.norm(x, weight, 1e-6)
        assert out.dtype == torch.bfloat16
        exact = kernel.norm(x.float(), weight, 1e-6)
        # an fp32 result may lie an ulp beside the border between two bf16 values
        half_a_step = exact.abs() * 2.0**-8 * 1.01
        assert bool(((out.float() - exact).abs() <= half_a_step).all())

    def test_2_a_row_depends_on_that_row_alone(self, kernel: NormKernel, randn: Randn) -> None:
        """2. A row has the same bits beside rows of NaN, and alone."""
        x, weight = randn(40, 48), randn(48)
        whole = kernel.norm(x, weight, 1e-6)
        spoiled = x.clone()
        spoiled[::2] = torch.nan
        assert same_bytes(kernel.norm(spoiled, weight, 1e-6)[1::2], whole[1::2])
        assert same_bytes(kernel.norm(x[7:8], weight, 1e-6), whole[7:8])
