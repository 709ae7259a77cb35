"""Routing and experts in Triton against the reference and against sums in float64.

Legend: T tokens, D hidden, K experts a token, E experts, I intermediate, S of the shared expert, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.kernels import experts_triton
from dsv4.kernels.base import ExpertWeights
from dsv4.kernels.experts_ref import TorchExperts
from dsv4.kernels.experts_triton import TritonExperts, sort_by_expert
from dsv4.kernels.grouped_triton import FEW_ROWS, FP32, MANY_ROWS, SOME_ROWS
from dsv4.kernels.linear_ref import TiledLinear, TorchLinear
from dsv4.testing.experts import ExpertsConformance
from dsv4.testing.memory import same_bytes, strided
from dsv4.triton_launch import Tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = TorchExperts(TorchLinear())
FAST = TritonExperts(TorchLinear())
DETERMINISTIC = TritonExperts(TiledLinear(), deterministic=True)


class TestConformance(ExpertsConformance):
    @pytest.fixture
    def device(self) -> torch.device:
        return DEVICE

    @pytest.fixture(params=[FAST, DETERMINISTIC], ids=["fast", "deterministic"])
    def kernel(self, request: pytest.FixtureRequest) -> object:
        return request.param


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def random_weights(
    experts: int, inner: int, shared: int, hidden: int, dtype: torch.dtype
) -> ExpertWeights:
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    shapes += [(2 * shared, hidden), (hidden, shared)]  # type: ignore[list-item]
    return ExpertWeights(*((randn(*shape) / math.sqrt(shape[-1])).to(dtype) for shape in shapes))


def random_choice(tokens: int, topk: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]
    chosen_TK = torch.stack(rows) if rows else torch.zeros(0, topk, dtype=torch.int64)
    return chosen_TK.to(DEVICE), randn(tokens, topk, seed=seed).abs()


@settings(max_examples=25)
@given(st.data())
def test_any_shape_gives_the_reference_result(data: st.DataObject) -> None:
    """Odd widths, shared and routed experts of different widths, unchosen experts full of NaN, strided inputs."""
    draw = data.draw
    tokens, experts = draw(st.sampled_from([1, 2, 17, 33])), draw(st.integers(1, 9))
    topk = draw(st.integers(1, experts))
    hidden, inner, shared = (draw(st.sampled_from([1, 7, 24, 32, 70, 128])) for _ in range(3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    limit = draw(st.sampled_from([0.0, 0.5, 10.0]))
    x_TD = randn(tokens, hidden).to(dtype)
    weights = random_weights(experts, inner, shared, hidden, dtype)
    # A narrow choice, so that some experts are left out and others take more than one tile.
    chosen_TK, weights_TK = random_choice(tokens, topk, draw(st.integers(topk, experts)), tokens)
    unchosen = sorted(set(range(experts)) - set(chosen_TK.flatten().tolist()))
    weights.w13_EID[unchosen], weights.w2_EDI[unchosen] = math.nan, math.nan
    wanted = REFERENCE.experts(x_TD, chosen_TK, weights_TK, weights, limit=limit).float()
    if draw(st.booleans()):
        x_TD, chosen_TK, weights_TK = strided(x_TD), strided(chosen_TK.int()), strided(weights_TK)
    y_TD = FAST.experts(x_TD, chosen_TK, weights_TK, weights, limit=limit)
    assert y_TD.dtype == dtype
    assert y_TD.shape == wanted.shape
    # bf16: the sum of K + 1 outputs of one rounding each, and casts of sums a step apart
    step = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert ((y_TD.float() - wanted).abs() <= step * (wanted.abs() + 1.0)).all()


@pytest.mark.parametrize("tokens", [1, 33])
def test_all_tokens_may_choose_one_expert(tokens: int) -> None:
    weights = random_weights(5, 24, 24, 32, torch.float32)
    weights.w13_EID[[0, 1, 2, 4]], weights.w2_EDI[[0, 1, 2, 4]] = math.nan, math.nan
    x_TD = randn(tokens, 32)
    chosen_TK = torch.full((tokens, 1), 3, device=DEVICE)
    ones_TK = torch.ones(tokens, 1, device=DEVICE)
    y_TD = FAST.experts(x_TD, chosen_TK, ones_TK, weights, limit=0.0)
    wanted_TD = torch.zeros(tokens, 32, dtype=torch.float64)
    for w13, w2 in (
        (weights.w13_EID[3], weights.w2_EDI[3]),
        (weights.shared_w13, weights.shared_w2),
    ):
        gate, up = (x_TD.cpu().double() @ w13.cpu().double().T).chunk(2, -1)
        wanted_TD += (gate / (1 + (-gate).exp()) * up) @ w2.cpu().double().T
    assert (y_TD.cpu().double() - wanted_TD).abs().max() < 1e-5


def test_a_pick_outside_the_experts_adds_nothing() -> None:
    weights = random_weights(4, 8, 8, 16, torch.float32)
    x_TD, p_TK = randn(3, 16), randn(3, 2).abs()
    bad_TK = torch.tensor([[1, -1], [4, 2], [2**31 - 1, -(2**31)]], device=DEVICE)
    y_TD = FAST.experts(x_TD, bad_TK, p_TK, weights, limit=10.0)
    kept_TK = torch.tensor([[1, 0], [0, 2], [0, 0]], device=DEVICE)
    zeroed_TK = p_TK * torch.tensor([[1, 0], [0, 1], [0, 0]], device=DEVICE)
    wanted_TD = REFERENCE.experts(x_TD, kept_TK, zeroed_TK, weights, limit=10.0)
    assert (y_TD - wanted_TD).abs().max() < 1e-5


def test_no_tokens_give_no_rows() -> None:
    weights = random_weights(4, 8, 8, 16, torch.bfloat16)
    empty = torch.zeros(0, 2, device=DEVICE)
    y_TD = FAST.experts(randn(0, 16).bfloat16(), empty.long(), empty, weights, limit=10.0)
    assert (y_TD.shape, y_TD.dtype) == ((0, 16), torch.bfloat16)
    zeros_T = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    chosen_TK, p_TK = FAST.route(
        randn(0, 16), randn(4, 16), topk=2, factor=1.0, token_ids_T=zeros_T, bias_E=randn(4), table_VK=None
    )  # fmt: skip
    assert chosen_TK.shape == p_TK.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_batch_mates(dtype: torch.dtype) -> None:
    """Bit for bit alone, in any order and among any others; mates of NaN leave it alone."""
    weights = random_weights(6, 24, 24, 40, dtype)
    x_TD = randn(30, 40).to(dtype)
    chosen_TK, p_TK = random_choice(30, 3, 6, seed=1)
    together = DETERMINISTIC.experts(x_TD, chosen_TK, p_TK, weights, limit=10.0)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    turned = DETERMINISTIC.experts(x_TD[order], chosen_TK[order], p_TK[order], weights, limit=10.0)
    assert same_bytes(turned, together[order])
    for t in (0, 13):
        own = slice(t, t + 1)
        alone = DETERMINISTIC.experts(x_TD[own], chosen_TK[own], p_TK[own], weights, limit=10.0)
        assert same_bytes(alone, together[own])
    x_TD[1:] = math.nan
    beside_nan = DETERMINISTIC.experts(x_TD, chosen_TK, p_TK, weights, limit=10.0)
    assert same_bytes(beside_nan[:1], together[:1])
    assert beside_nan[1:].isnan().all()


def test_nan_stays_nan_through_the_clamp() -> None:
    weights = random_weights(2, 8, 8, 16, torch.float32)
    weights.w13_EID[1, 3] = math.nan
    chosen_TK = torch.tensor([[0], [1]], device=DEVICE)
    ones_TK = torch.ones(2, 1, device=DEVICE)
    y_TD = FAST.experts(randn(2, 16), chosen_TK, ones_TK, weights, limit=1.0)
    assert y_TD.isnan().all(-1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "tiles"),
    [(1, 6, 9, FEW_ROWS), (300, 5, 7, SOME_ROWS), (300, 5, 7, MANY_ROWS), (40, 3, 300, FP32)],
)
def test_the_sort_groups_every_pick_once_in_ascending_order(
    tokens: int, topk: int, experts: int, tiles: Tiling
) -> None:
    chosen_TK, _ = random_choice(tokens, topk, experts, seed=4)
    chosen_TK[0, 0] = -1
    groups = sort_by_expert(chosen_TK.int(), experts, tiles)
    flat = chosen_TK.flatten().tolist()
    picks = sorted((p for p, e in enumerate(flat) if 0 <= e < experts), key=lambda p: (flat[p], p))
    assert groups.order_M[: len(picks)].tolist() == picks
    num_tiles = int(groups.num_tiles)
    assert num_tiles <= groups.tiles.shape[0]
    wanted, first = [], 0
    for expert in range(experts):
        end = first + flat.count(expert)
        wanted += [[expert, at, min(at + tiles.block_m, end)] for at in range(first, end, tiles.block_m)]  # fmt: skip
        first = end
    assert groups.tiles[:num_tiles, :3].tolist() == wanted


@settings(max_examples=25)
@given(st.data())
def test_the_route_is_the_references(data: st.DataObject) -> None:
    draw = data.draw
    tokens, experts = draw(st.sampled_from([1, 5, 33])), draw(st.sampled_from([1, 2, 9, 64, 257]))
    topk = draw(st.integers(1, min(8, experts)))
    x_TD = randn(tokens, 12) * draw(st.sampled_from([0.1, 3.0, 30.0]))
    weight_ED, ids_T = randn(experts, 12), torch.arange(tokens, device=DEVICE) % 4
    bias_E: Tensor | None = randn(experts)
    table_VK: Tensor | None = None
    if draw(st.booleans()):
        bias_E, table_VK = None, random_choice(4, topk, experts, seed=6)[0]
    found, wanted = (
        kernel.route(
            x_TD, weight_ED, topk=topk, factor=1.5, token_ids_T=ids_T, bias_E=bias_E, table_VK=table_VK
        )
        for kernel in (FAST, REFERENCE)
    )  # fmt: skip
    assert found[0].tolist() == wanted[0].tolist()
    assert (found[1] - wanted[1]).abs().max() < 2e-6


def test_scores_keep_their_precision_at_both_ends() -> None:
    """sqrt(softplus) of logits from far below zero to far above torch's threshold, against float64."""
    logits = [-80.0, -20.0, -5.0, -1e-3, 0.0, 1.0, 19.99, 20.01, 1e4]
    weight_ED = torch.tensor(logits, device=DEVICE)[:, None]
    one = torch.ones(1, 1, device=DEVICE)
    for other, logit in enumerate(logits):
        # Paired with the score of logit 0, whose square is log 2.
        table_VK = torch.tensor([[other, logits.index(0.0)]], device=DEVICE)
        _, p_TK = FAST.route(
            one, weight_ED, topk=2, factor=1.0, token_ids_T=torch.zeros(1, dtype=torch.int64, device=DEVICE),
            bias_E=None, table_VK=table_VK,
        )  # fmt: skip
        own = math.sqrt(math.log1p(math.exp(logit)) if logit < 50 else logit)
        wanted = own / (own + math.sqrt(math.log(2)))
        assert p_TK[0, 0].item() == pytest.approx(wanted, rel=5e-6)


@pytest.mark.usefixtures("no_bf16_arithmetic")
def test_bf16_is_rounded_where_a_linear_layer_rounds() -> None:
    """Far from every border of bf16 the result equals the reference's bit for bit."""
    weights = random_weights(6, 64, 64, 128, torch.bfloat16)
    x_TD = randn(20, 128).bfloat16()
    chosen_TK, p_TK = random_choice(20, 3, 6, seed=7)
    y_TD = FAST.experts(x_TD, chosen_TK, p_TK, weights, limit=10.0)
    wanted_TD = REFERENCE.experts(x_TD, chosen_TK, p_TK, weights, limit=10.0)
    # A cast left out would leave at most two thirds of them equal.
    assert (y_TD == wanted_TD).float().mean() > 0.85


def test_a_token_id_or_table_entry_out_of_range_chooses_no_expert() -> None:
    table_VK = torch.tensor([[0, 7], [1, -1]], device=DEVICE)
    ids_T = torch.tensor([0, 1, -1, 2], device=DEVICE)
    chosen_TK, p_TK = FAST.route(
        randn(4, 8), randn(3, 8), topk=2, factor=2.0, token_ids_T=ids_T, bias_E=None, table_VK=table_VK
    )  # fmt: skip
    assert chosen_TK.tolist() == [[0, -1], [1, -1], [-1, -1], [-1, -1]]
    assert p_TK.tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_every_launcher_choice_is_listed_for_compilation() -> None:
    names = [variant.name for variant in experts_triton.variants()]
    assert len(names) == len(set(names))
    for tiles in ("few", "some", "many"):
        for backend in ("cuda", "hip"):
            assert {f"experts-{part}-{tiles}-{backend}" for part in ("up", "down")} <= set(names)
