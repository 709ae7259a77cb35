"""Conformance of a LinearKernel.

Legend: T tokens, K inputs, O outputs, G groups.
"""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.base import LinearKernel
from dsv4.testing.kernel_setup import KernelSetup, Randn
from dsv4.testing.memory import same_bytes, strided

SHAPES = [(0, 5, 3), (1, 1, 1), (1, 40, 24), (7, 33, 5), (16, 8, 9), (17, 64, 130), (40, 20, 31)]


class LinearConformance(KernelSetup[LinearKernel]):
    """Subclass and give the fixture `kernel`."""

    @pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_1_y_is_x_times_w_transposed_in_the_dtype_of_x(
        self,
        kernel: LinearKernel,
        randn: Randn,
        tokens: int,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
    ) -> None:
        """1. y = x W^T in x's dtype, for dense and strided operands."""
        x_TK, weight_OK = randn(tokens, inputs).to(dtype), randn(outputs, inputs).to(dtype)
        wanted = [
            [sum(a * b for a, b in zip(row, column, strict=True)) for column in weight_OK.tolist()]
            for row in x_TK.double().tolist()
        ]
        step = 2.0**-8 / self.tolerance if dtype == torch.bfloat16 else 1.0
        for x, weight in ((x_TK, weight_OK), (strided(x_TK), strided(weight_OK))):
            y = kernel.linear(x, weight)
            assert y.dtype == dtype
            wanted_TO = torch.tensor(wanted, dtype=torch.float64).view(tokens, outputs)
            self.close(y, wanted_TO, scale=step * 4 * inputs**0.5)

    @pytest.mark.parametrize("tokens", [0, 1, 5, 16, 33])
    def test_1_grouped_multiplies_each_group_with_its_own_weight(
        self, kernel: LinearKernel, randn: Randn, tokens: int
    ) -> None:
        """1. Group g of every token times weight g -> [T, G, O]."""
        x_TGK, weight_GOK = randn(tokens, 3, 20), randn(3, 7, 20)
        wanted_TGO = torch.stack(
            [x_TGK[:, g].double() @ weight_GOK[g].double().t() for g in range(3)], 1
        )
        for x in (x_TGK, strided(x_TGK)):
            self.close(kernel.grouped(x, weight_GOK), wanted_TGO.cpu(), scale=20)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("inputs", "outputs"), [(33, 5), (64, 130), (256, 48), (1, 7)])
    def test_2_a_rows_bits_depend_on_that_row_alone_if_row_invariant(
        self, kernel: LinearKernel, randn: Randn, inputs: int, outputs: int, dtype: torch.dtype
    ) -> None:
        """2. If `row_invariant`, a row's bits depend on that row alone: not on its place, nor on how many rows there
        are, nor on what stands beside it."""
        if not kernel.row_invariant:
            pytest.skip("this kernel does not claim row invariance")
        weight_OK = randn(outputs, inputs).to(dtype)
        x_TK = randn(37, inputs).to(dtype)
        whole_TO = kernel.linear(x_TK, weight_OK)
        spoiled_TK = x_TK.clone()
        spoiled_TK[::3] = torch.nan
        spoiled_TO = kernel.linear(spoiled_TK, weight_OK)
        for row in (0, 1, 15, 16, 17, 36):
            assert same_bytes(kernel.linear(x_TK[row : row + 1], weight_OK)[0], whole_TO[row])
            assert same_bytes(kernel.linear(x_TK[row:], weight_OK)[0], whole_TO[row])
            if row % 3:
                assert same_bytes(spoiled_TO[row], whole_TO[row])
        x_TGK, weight_GOK = randn(19, 3, inputs).to(dtype), randn(3, outputs, inputs).to(dtype)
        whole_TGO = kernel.grouped(x_TGK, weight_GOK)
        for row in (0, 7, 18):
            assert same_bytes(kernel.grouped(x_TGK[row : row + 1], weight_GOK)[0], whole_TGO[row])
