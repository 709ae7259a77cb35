"""The Triton hyper-connections against float64, and a token's results against themselves in any batch.

Legend: T tokens, N streams, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.kernels import mix_triton
from dsv4.kernels.base import MixWeights
from dsv4.kernels.linear_ref import TorchLinear
from dsv4.kernels.mix_ref import TorchMix
from dsv4.kernels.mix_triton import Shape, TritonMix, thirds
from dsv4.kernels.tile_triton import to_fp32
from dsv4.testing.memory import same_bytes, strided

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS, HC_EPS = 1e-5, 1e-4  # large enough to see where they enter


@pytest.fixture(autouse=True, scope="module")
def _new_tensors_hold_nan() -> Iterator[None]:
    # torch fills new memory with NaN in this mode: outputs and partial sums are poisoned.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights_of(streams: int, hidden: int, *, head: bool = False) -> tuple[MixWeights, Tensor]:
    """Parameters that make every gate move, and a norm weight."""
    rows, inputs = streams if head else (2 + streams) * streams, streams * hidden
    fn = randn(1, rows, inputs) * inputs**-0.5
    return MixWeights(fn, randn(2, rows), 2 * randn(3, 1 if head else 3)), randn(4, hidden)


def logits(streams_TND: Tensor, weights: MixWeights) -> Tensor:
    flat = streams_TND.double().flatten(1)
    normed = flat / (flat.square().mean(-1, keepdim=True) + EPS).sqrt()
    z = normed @ weights.fn.double().t()
    n = streams_TND.shape[1]
    parts = [0] * n + [1] * n + [2] * n * n
    return z * weights.scale.double()[parts[: z.shape[1]]] + weights.base.double()


def wanted_comb(logits_TNN: Tensor, iterations: int) -> Tensor:
    comb = logits_TNN.softmax(-1) + HC_EPS
    comb = comb / (comb.sum(1, keepdim=True) + HC_EPS)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(1, keepdim=True) + HC_EPS)
    return comb


def wanted_input(gates_TN: Tensor, streams_TND: Tensor, norm: Tensor) -> Tensor:
    """float64, but for the cast to the streams' dtype before the norm."""
    mixed = (
        torch.einsum("tn,tnd->td", gates_TN, streams_TND.double()).to(streams_TND.dtype).double()
    )
    return mixed / (mixed.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()


def wanted_pre(
    streams_TND: Tensor, weights: MixWeights, norm: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, _ = streams_TND.shape
    z = logits(streams_TND, weights)
    comb = wanted_comb(z[:, 2 * n :].reshape(tokens, n, n), iterations)
    gates_TN = z[:, :n].sigmoid() + HC_EPS
    return wanted_input(gates_TN, streams_TND, norm), 2 * z[:, n : 2 * n].sigmoid(), comb


def pre(
    streams_TND: Tensor, weights: MixWeights, norm: Tensor, iterations: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    return TritonMix().pre(
        streams_TND, weights, norm=norm, eps=EPS, hc_eps=HC_EPS, iterations=iterations
    )


def assert_close(actual: Tensor, wanted: Tensor, limit: float) -> None:
    """`limit` of the size of the wanted values, or of 1."""
    assert actual.shape == wanted.shape
    error = (actual.double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert bool((error <= limit).all()), error.max()


def assert_rounds(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Values of `dtype` near float64 ones. In bf16 a sum on a border may be cast to the other side: two steps."""
    assert actual.dtype == dtype
    assert_close(actual, wanted, 2.0**-6 if dtype == torch.bfloat16 else 3e-5)
    if dtype == torch.bfloat16 and actual.numel() > 50:
        off = (actual.double() - wanted).abs() > 1.01 * 2.0**-8 * wanted.abs() + 1e-5
        assert off.double().mean().item() <= 0.02


@settings(max_examples=24)
@given(
    tokens=st.sampled_from([0, 1, 2, 7, 17]),
    streams=st.integers(1, 5),
    hidden=st.sampled_from([1, 6, 33, 64, 129, 300]),
    iterations=st.sampled_from([1, 2, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dense=st.booleans(),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_pre_mixes_the_streams_into_the_sub_blocks_input(
    tokens: int, streams: int, hidden: int, iterations: int, dtype: torch.dtype, dense: bool, scale: float
) -> None:  # fmt: skip
    streams_TND = (scale * randn(0, tokens, streams, hidden)).to(dtype)
    weights, norm = weights_of(streams, hidden)
    wanted = wanted_pre(streams_TND, weights, norm, iterations)
    given_TND = streams_TND if dense else strided(streams_TND)
    x_TD, post_TN, comb_TNN = pre(given_TND, weights, norm, iterations)
    assert_rounds(x_TD, wanted[0], dtype)
    assert_close(post_TN, wanted[1], 1e-5)
    assert_close(comb_TNN, wanted[2], 1e-5)
    assert post_TN.dtype == comb_TNN.dtype == torch.float32


@settings(max_examples=12)
@given(
    tokens=st.sampled_from([0, 1, 5]),
    streams=st.integers(1, 5),
    hidden=st.sampled_from([1, 33, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dense=st.booleans(),
)
def test_head_sums_the_streams_with_sigmoid_weights(
    tokens: int, streams: int, hidden: int, dtype: torch.dtype, dense: bool
) -> None:
    streams_TND = randn(0, tokens, streams, hidden).to(dtype)
    weights, norm = weights_of(streams, hidden, head=True)
    gates_TN = logits(streams_TND, weights).sigmoid() + HC_EPS
    given_TND = streams_TND if dense else strided(streams_TND)
    x_TD = TritonMix().head(given_TND, weights, norm=norm, eps=EPS, hc_eps=HC_EPS)
    assert_rounds(x_TD, wanted_input(gates_TN, streams_TND, norm), dtype)


@settings(max_examples=20)
@given(
    tokens=st.sampled_from([0, 1, 6]),
    streams=st.integers(1, 5),
    hidden=st.sampled_from([1, 33, 128, 1030]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dense=st.booleans(),
    scale=st.sampled_from([1.0, 1e20]),
)
def test_post_adds_the_sub_blocks_output_to_the_mixed_streams(
    tokens: int, streams: int, hidden: int, dtype: torch.dtype, dense: bool, scale: float
) -> None:
    y_TD = (scale * randn(0, tokens, hidden)).to(dtype)
    streams_TND = (scale * randn(1, tokens, streams, hidden)).to(dtype)
    post_TN, comb_TNN = randn(2, tokens, streams), randn(3, tokens, streams, streams)
    wanted = post_TN.double().unsqueeze(-1) * y_TD.double().unsqueeze(1)
    wanted += torch.einsum("tjk,tjd->tkd", comb_TNN.double(), streams_TND.double())
    if not dense:
        y_TD, streams_TND = strided(y_TD), strided(streams_TND)
        post_TN, comb_TNN = strided(post_TN), strided(comb_TNN)
    out_TND = TritonMix().post(y_TD, streams_TND, post_TN, comb_TNN)
    assert out_TND.dtype == dtype
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    error = (out_TND.double() - wanted).abs()
    assert bool((error <= step * wanted.abs() + 1e-5 * scale).all())


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_depend_on_that_token_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(2, 500)
    assert shape.group > 1
    streams_TND = randn(0, 66, shape.streams, shape.hidden).to(dtype)
    weights, norm = weights_of(shape.streams, shape.hidden)
    whole = pre(streams_TND, weights, norm)
    wanted = wanted_pre(streams_TND, weights, norm, 3)
    assert_rounds(whole[0], wanted[0], dtype)
    for out, right in zip(whole[1:], wanted[1:], strict=True):
        assert_close(out, right, 1e-5)

    def check(tokens: slice, given_TND: Tensor, every: int = 1) -> None:
        part = pre(given_TND[tokens], weights, norm)
        for a, b in zip(part, whole, strict=True):
            assert same_bytes(a[::every], b[tokens][::every])

    for tokens in (slice(0, 1), slice(65, 66), slice(7, 9), slice(59, 66), slice(1, 65)):
        check(tokens, streams_TND)
    spoiled_TND = streams_TND.clone()
    spoiled_TND[1::2] = torch.nan
    check(slice(4, 9), spoiled_TND, every=2)
    # As where there are tokens enough for one program to make a group of chunks.
    monkeypatch.setattr(mix_triton, "SERIAL_PROGRAMS", 1)
    check(slice(62, 66), streams_TND)


def test_heads_and_posts_bits_depend_on_the_token_alone() -> None:
    streams_TND = randn(0, 66, 4, 40).bfloat16()
    weights, norm = weights_of(4, 40, head=True)
    mix = TritonMix()

    def run(tokens: slice) -> tuple[Tensor, Tensor]:
        x = mix.head(streams_TND[tokens], weights, norm=norm, eps=EPS, hc_eps=HC_EPS)
        y_TD, gates_TN = streams_TND[tokens, 0], streams_TND[tokens, :, 0].float()
        combs_TNN = streams_TND[tokens, :, 1:5].float()
        return x, mix.post(y_TD, streams_TND[tokens], gates_TN, combs_TNN)

    whole = run(slice(None))
    for tokens in (slice(0, 1), slice(64, 66), slice(9, 16)):
        part = run(tokens)
        assert all(same_bytes(a, b[tokens]) for a, b in zip(part, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_wider_than_a_program_holds_are_read_in_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix_triton, "HELD", 128)
    streams_TND = randn(0, 3, 4, 100).to(dtype)
    weights, norm = weights_of(4, 100)
    assert not Shape(4, 100).finish()["HOLD"]
    x_TD, _, _ = pre(streams_TND, weights, norm)
    assert_rounds(x_TD, wanted_pre(streams_TND, weights, norm, 3)[0], dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("streams", [3, 4])
def test_saturated_gates_give_no_nan(streams: int) -> None:
    streams_TND = randn(0, 5, streams, 32)
    weights, norm = weights_of(streams, 32)
    weights = MixWeights(weights.fn, 1e4 * weights.base, weights.scale)
    wanted = wanted_pre(streams_TND, weights, norm, 20)
    for out, right in zip(pre(streams_TND, weights, norm, 20), wanted, strict=True):
        assert_close(out, right, 1e-4)


def test_streams_of_zeros_give_zeros_and_gates_of_the_base_alone() -> None:
    streams_TND = torch.zeros(2, 4, 32, device=DEVICE)
    weights, norm = weights_of(4, 32)
    x_TD, post_TN, _ = pre(streams_TND, weights, norm)
    assert not x_TD.any()
    assert_close(post_TN, (2 * weights.base[4:8].double().sigmoid()).expand(2, 4), 1e-6)


def test_the_reference_agrees() -> None:
    streams_TND = 3 * randn(0, 9, 4, 96)
    weights, norm = weights_of(4, 96)
    reference = TorchMix(TorchLinear())
    settings_of_mix = {"norm": norm, "eps": EPS, "hc_eps": HC_EPS}
    wanted = reference.pre(streams_TND.clone(), weights, iterations=20, **settings_of_mix)
    for out, right in zip(pre(streams_TND, weights, norm, 20), wanted, strict=True):
        assert_close(out, right.double(), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_keep_every_bit_of_fn(dtype: torch.dtype) -> None:
    # Pairs of products that cancel but for the last bits of fn, which no sum of large values can then swallow.
    signs = torch.tensor([1.0, -1.0], device=DEVICE).repeat(512)
    fn = torch.full((24, 1024), 1 + 2.0**-10, device=DEVICE) + 2.0**-20 * (signs > 0)
    weights = MixWeights(fn, torch.zeros(24, device=DEVICE), torch.ones(3, device=DEVICE))
    streams_TND = signs.view(1, 4, 256).to(dtype)
    wanted_TN = wanted_pre(streams_TND, weights, signs[:256], 3)[1]
    _, post_TN, _ = pre(streams_TND, weights, signs[:256])
    assert bool((wanted_TN > 1 + 2e-4).all())
    assert_close(post_TN, wanted_TN, 1e-6)


def test_three_bf16_values_hold_an_fp32_value() -> None:
    x = randn(0, 1024) * torch.exp(10 * randn(1, 1024))
    out = torch.empty(3, 1024, device=DEVICE)
    _split_kernel[(1,)](x, out, SIZE=1024)
    assert torch.equal(out.double().sum(0), x.double())
    assert torch.equal(out.bfloat16().float(), out)


@triton.jit
def _split_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    high, middle, low = thirds(tl.load(x_ptr + lane))
    tl.store(out_ptr + lane, to_fp32(high))
    tl.store(out_ptr + SIZE + lane, to_fp32(middle))
    tl.store(out_ptr + 2 * SIZE + lane, to_fp32(low))


@given(
    streams=st.integers(1, 8),
    hidden=st.integers(1, 20_000),
)
def test_chunks_cover_a_stream_once_in_whole_groups(streams: int, hidden: int) -> None:
    shape = Shape(streams, hidden)
    assert shape.chunk * (shape.stream_chunks - 1) < hidden <= shape.chunk * shape.stream_chunks
    assert shape.stream_chunks % shape.group == 0
    assert shape.stream_chunks <= mix_triton.CHUNKS_A_STREAM
    assert shape.rows < shape.block_r


def test_no_bf16_arithmetic_under_the_interpreter(no_bf16_arithmetic) -> None:
    streams_TND = randn(0, 2, 4, 96).bfloat16()
    weights, norm = weights_of(4, 96)
    x_TD, post_TN, comb_TNN = pre(streams_TND, weights, norm)
    TritonMix().post(x_TD, streams_TND, post_TN, comb_TNN)
