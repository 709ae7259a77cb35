"""The row-invariant Triton GEMM against float64, and its rows against each other bit for bit.

Legend: T tokens, K inputs, O outputs, G groups.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dsv4.kernels import linear_triton
from dsv4.kernels.linear_triton import TritonLinear, chunks, tiling
from dsv4.testing.memory import same_bytes, strided

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rounds(y: Tensor, wanted: Tensor, inputs: int) -> None:
    """Within half a step of the dtype, and the error of an fp32 sum."""
    step = 2.0**-8 if y.dtype == torch.bfloat16 else 2.0**-23
    error = (y.double() - wanted).abs()
    limit = step * wanted.abs() + 4e-6 * (inputs + 1) ** 0.5
    assert y.shape == wanted.shape
    assert bool((error <= limit).all()), error.max()


@settings(max_examples=30)
@given(
    tokens=st.sampled_from([0, 1, 2, 31, 32, 33, 64, 70]),
    inputs=st.sampled_from([1, 5, 63, 64, 128, 300]),
    outputs=st.sampled_from([1, 24, 65, 128, 200]),
    dtype=st.sampled_from(DTYPES),
    dense=st.booleans(),
)
def test_linear_is_x_times_w_transposed(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype, dense: bool
) -> None:
    x_TK = randn(0, tokens, inputs).to(dtype).to(DEVICE)
    weight_OK = randn(1, outputs, inputs).to(dtype).to(DEVICE)
    wanted_TO = functional.linear(x_TK.double(), weight_OK.double())
    if not dense:
        x_TK, weight_OK = strided(x_TK), strided(weight_OK)
    y_TO = TritonLinear().linear(x_TK, weight_OK)
    assert y_TO.dtype == dtype
    assert_rounds(y_TO, wanted_TO, inputs)


@settings(max_examples=12)
@given(
    tokens=st.sampled_from([0, 1, 33, 66]),
    groups=st.integers(1, 3),
    inputs=st.sampled_from([3, 64, 100]),
    outputs=st.sampled_from([7, 130]),
    dtype=st.sampled_from(DTYPES),
    dense=st.booleans(),
)
def test_grouped_multiplies_each_group_with_its_own_weight(
    tokens: int, groups: int, inputs: int, outputs: int, dtype: torch.dtype, dense: bool
) -> None:
    x_TGK = randn(0, tokens, groups, inputs).to(dtype).to(DEVICE)
    weight_GOK = randn(1, groups, outputs, inputs).to(dtype).to(DEVICE)
    wanted_TGO = torch.einsum("tgk,gok->tgo", x_TGK.double(), weight_GOK.double())
    if not dense:
        x_TGK, weight_GOK = strided(x_TGK), strided(weight_GOK)
    y_TGO = TritonLinear().grouped(x_TGK, weight_GOK)
    assert y_TGO.dtype == dtype
    assert_rounds(y_TGO, wanted_TGO, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(33, 5), (700, 48), (1024, 130)])
def test_a_rows_bits_depend_on_that_row_alone(
    inputs: int, outputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = TritonLinear()
    x_TK = randn(0, 70, inputs).to(dtype).to(DEVICE)
    weight_OK = randn(1, outputs, inputs).to(dtype).to(DEVICE)
    whole_TO = linear.linear(x_TK, weight_OK)
    assert_rounds(whole_TO, x_TK.double() @ weight_OK.double().T, inputs)
    for rows in (slice(0, 1), slice(1, 3), slice(64, 65), slice(5, 12), slice(3, 67)):
        assert same_bytes(linear.linear(x_TK[rows], weight_OK), whole_TO[rows])
    spoiled_TK = x_TK.clone()
    spoiled_TK[::2] = torch.nan
    assert same_bytes(linear.linear(spoiled_TK, weight_OK)[1::2], whole_TO[1::2])
    # As where there are rows enough for one program to make a whole sum.
    monkeypatch.setattr(linear_triton, "SERIAL_PROGRAMS", 1)
    assert same_bytes(linear.linear(x_TK, weight_OK), whole_TO)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_has_the_bits_of_a_linear_layer_of_its_own_in_any_batch(dtype: torch.dtype) -> None:
    linear = TritonLinear()
    x_TGK = randn(0, 35, 3, 520).to(dtype).to(DEVICE)
    weight_GOK = randn(1, 3, 40, 520).to(dtype).to(DEVICE)
    whole_TGO = linear.grouped(x_TGK, weight_GOK)
    for token in (0, 7, 34):
        assert same_bytes(linear.grouped(x_TGK[token : token + 1], weight_GOK)[0], whole_TGO[token])


def test_columns_may_be_strided_and_rows_may_overlap() -> None:
    x_KT, weight_KO = randn(0, 40, 5).to(DEVICE), randn(1, 40, 6).to(DEVICE)
    y_TO = TritonLinear().linear(x_KT.T, weight_KO.T)
    assert_rounds(y_TO, x_KT.T.double() @ weight_KO.double(), 40)
    one_TK = x_KT.T[:1].expand(5, 40)
    y_TO = TritonLinear().linear(one_TK, weight_KO.T)
    assert_rounds(y_TO, one_TK.double() @ weight_KO.double(), 40)


@given(
    inputs=st.integers(0, 40_000),
    outputs=st.integers(1, 140_000),
    groups=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
)
def test_chunks_cover_the_inputs_once(
    inputs: int, outputs: int, groups: int, dtype: torch.dtype
) -> None:
    tile = tiling(dtype)
    column_tiles = groups * -(-outputs // tile.block_n)
    chunk, num_chunks = chunks(inputs, column_tiles, tile.block_k)
    assert chunk % tile.block_k == 0
    assert chunk * (num_chunks - 1) <= max(inputs - 1, 0) < chunk * num_chunks
    assert 1 <= num_chunks <= linear_triton.MOST_CHUNKS


def test_no_bf16_arithmetic_under_the_interpreter(no_bf16_arithmetic) -> None:
    x_TK, weight_OK = randn(0, 3, 600).bfloat16(), randn(1, 5, 600).bfloat16()
    TritonLinear().linear(x_TK.to(DEVICE), weight_OK.to(DEVICE))
