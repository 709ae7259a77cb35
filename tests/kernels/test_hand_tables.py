"""Reference kernels on numbers small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4.kernels.attend_ref import TorchAttention
from dsv4.kernels.base import Rounding
from dsv4.kernels.compress_ref import TorchCompress
from dsv4.kernels.mix_ref import sinkhorn
from dsv4.kernels.rope_ref import rotate
from dsv4.kernels.score_ref import TorchScore
from dsv4.kernels.select_ref import TorchSelect
from dsv4.kernels.store_ref import TorchStore
from dsv4.metadata.plans import (
    CompressorTarget,
    FoldPlan,
    IndexStream,
    OverlapPlan,
    RopeTable,
    ScoreInputs,
    SelectOutput,
    Source,
)
from dsv4.pool.base import KVView
from dsv4.pool.formats import PlainRows
from dsv4.pool.geometry import PagedRows

NAN = math.nan
QUARTER, NO_TURN = (0.0, 1.0), (1.0, 0.0)
both_modes = pytest.mark.parametrize("deterministic", [False, True])


def view_of(rows: list[list[float]]) -> KVView:
    storage = torch.tensor(rows)
    return KVView(storage, storage.shape[0], PlainRows(torch.float32, storage.shape[1]))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def turns(*cos_sin: tuple[float, float]) -> RopeTable:
    """One rotated pair per token."""
    return RopeTable(
        torch.tensor([[cos] for cos, _ in cos_sin]), torch.tensor([[sin] for _, sin in cos_sin])
    )


def test_a_quarter_turn_takes_the_first_of_a_pair_to_the_second() -> None:
    x = torch.tensor([[7.0, 1.0, 0.0], [7.0, 2.0, 3.0]])
    rope = turns(QUARTER, QUARTER)
    assert rotate(x, rope).tolist() == [[7.0, 0.0, 1.0], [7.0, -3.0, 2.0]]
    assert rotate(x, rope, inverse=True).tolist() == [[7, 0.0, -1.0], [7.0, 3.0, -2.0]]


def test_store_norms_then_weighs_then_turns() -> None:
    view = view_of([[NAN, NAN]] * 3)
    fresh_TD = torch.full((2, 2), NAN)
    q_THD = TorchStore().store(
        torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]),
        torch.tensor([[1.0, -1.0], [5.0, 5.0]]),
        kv_norm=torch.tensor([2.0, 3.0]),
        eps=1e-30,
        rope=turns(QUARTER, NO_TURN),
        store_loc_T=ints(2, -1),
        view=view,
        rounding=Rounding.NONE,
        fresh_TD=fresh_TD,
    )
    # (3, 4) over its root mean square 5 / sqrt 2, then a quarter turn; a zero vector stays zero
    wanted = torch.tensor([[[-0.8, 0.6]], [[0.0, 0.0]]]) * math.sqrt(2)
    assert torch.allclose(q_THD, wanted, atol=1e-6)
    assert torch.allclose(fresh_TD, torch.tensor([[3.0, 2.0], [2.0, 3.0]]), atol=1e-6)
    assert torch.equal(view.storage[2], fresh_TD[0])
    assert view.storage[:2].isnan().all()


@both_modes
def test_attention_weighs_rows_by_hand(deterministic: bool) -> None:
    """Scores log 2 and 0 beside a sink of 0: weights 1/2, 1/4, and 1/4 for the sink."""
    rows = view_of([[math.log(2), 8.0], [0.0, 4.0], [NAN, NAN]])
    window = Source(rows, IndexStream(ints(0, 1, 1), ints(0, -1), 1))
    entries = Source(rows, IndexStream(ints(0, 1, 1), ints(1, 2), 1))
    out_THD, lse_TH = torch.full((2, 1, 2), NAN), torch.full((2, 1), NAN)
    TorchAttention(deterministic=deterministic).attend(
        torch.tensor([[[1.0, 0.0]], [[5.0, 5.0]]]),
        [window, entries],
        torch.tensor([0.0]),
        scale=1.0,
        out_THD=out_THD,
        lse_TH=lse_TH,
    )
    wanted = [0.5 * math.log(2), 0.5 * 8 + 0.25 * 4]
    assert torch.allclose(out_THD[0, 0], torch.tensor(wanted))
    assert torch.allclose(lse_TH[0], torch.tensor([math.log(3)]))
    assert out_THD[1].tolist() == [[0.0, 0.0]]
    assert lse_TH[1].tolist() == [-math.inf]


@both_modes
def test_scores_clip_each_head_then_weigh(deterministic: bool) -> None:
    """Keys (1, 0) and (-2, 1): head 0 sees 1 and -2 -> 0, head 1 sees 0 and 1; weights 2 and -3."""
    paged = PagedRows(
        block_table=torch.tensor([[1, 0]], dtype=torch.int32), rows_per_page=1, base=0
    )
    inputs = ScoreInputs(
        view=view_of([[-2.0, 1.0], [1.0, 0.0]]),
        keys=paged,
        slot_T=ints(0, -1),
        num_visible_T=ints(2, 0),
        max_entries=2,
        query_lengths=(1, 1),
        request_slots_B=ints(0, -1),
        tile_tokens=2,
    )
    out_TN = torch.full((2, 2), NAN)
    TorchScore(deterministic=deterministic).score(
        torch.tensor([[[1.0, 0.0], [0.0, 1.0]]] * 2),
        torch.tensor([[2.0, -3.0]] * 2),
        inputs,
        first_token=0,
        out_TN=out_TN,
    )
    assert out_TN.tolist() == [[2.0, -3.0], [-math.inf, -math.inf]]


def test_select_takes_two_of_four_in_entry_order() -> None:
    paged = PagedRows(block_table=ints(5, 2).unsqueeze(0), rows_per_page=2, base=100)
    stream = IndexStream(ints(0, 2, 3), torch.full((4,), 2**31 - 1, dtype=torch.int32), 2)
    output = SelectOutput(
        stream=stream, scratch=ints(*[0] * 32), lane_TK=ints(0, 1, 2, 3).view(2, 2), rows=paged
    )
    inputs = ScoreInputs(
        view=view_of([[0.0]]),
        keys=paged,
        slot_T=ints(0, 0),
        num_visible_T=ints(4, 1),
        max_entries=4,
        query_lengths=(2,),
        request_slots_B=ints(0),
        tile_tokens=2,
    )
    scores_TN = torch.tensor([[1.0, NAN, 9.0, 1.0], [NAN, 9.0, 9.0, 9.0]])
    TorchSelect().select(scores_TN, inputs, output, first_token=0)
    # entries 0 (ties with 3) and 2: page 5 row 0 and page 2 row 0; then the only visible entry of token 1
    assert stream.indices_N.tolist() == [110, 104, 110, -1]


def test_an_overlapping_entry_pools_a_of_the_window_before_and_b_of_its_own() -> None:
    """Ratio 1, two channels: rows are kv A, kv B, gate A, gate B. Equal gates give the mean of A before and B own."""
    target = CompressorTarget(
        state_view=view_of([[NAN] * 8, [6.0, 6.0, NAN, NAN, 0.0, 0.0, NAN, NAN]]),
        entry_view=view_of([[NAN, NAN]] * 2),
        entry_loc_E=ints(1),
        pooled_EC=torch.full((4, 4), NAN),
    )
    plan = OverlapPlan(
        ratio=1,
        in_place=True,
        ape_row_T=ints(0),
        state_loc_T=ints(0),
        source_EM=ints(1, 2).unsqueeze(0),
        entry_rope=turns(NO_TURN),
    )
    own_TC = torch.tensor([[50.0, 51.0, 2.0, 0.0, 52.0, 53.0, 0.0, 0.0]])
    TorchCompress().overlap(
        own_TC,
        ape_MC=torch.zeros(1, 4),
        norm=torch.tensor([1.0, 1.0]),
        eps=1e-30,
        plan=plan,
        target=target,
        rounding=Rounding.NONE,
    )
    # means (6 + 2) / 2 and (6 + 0) / 2, over the root mean square of (4, 3)
    wanted = torch.tensor([4.0, 3.0]) / math.sqrt(12.5)
    assert torch.allclose(target.entry_view.storage[1], wanted)
    assert target.entry_view.storage[0].isnan().all()
    assert torch.equal(target.state_view.storage[0], own_TC[0])


def test_a_fold_goes_on_from_its_accumulator_and_leaves_the_rest_of_the_window() -> None:
    """Ratio 3, D = 1. The accumulator holds token 0 (gate 0, value 3), token 1 is a raw row, token 2 is of this
    forward: gates 0, 0 and log 2 weigh 1, 1, 2. Token 3 opens the next window, and can still be rolled back."""
    accumulators = view_of([[0.0, 0.0, 1.0, 1.0, 3.0, 3.0, 1.0]])
    target = CompressorTarget(
        state_view=view_of([[7.0, 11.0, 0.0, 0.0]]),
        entry_view=view_of([[NAN, NAN]]),
        entry_loc_E=ints(0),
        pooled_EC=torch.full((4, 4), NAN),
        accumulator_view=accumulators,
    )
    plan = FoldPlan(
        ratio=3,
        in_place=True,
        starts_B1=ints(0, 2),
        closing_indptr_B1=ints(0, 1),
        ape_row_T=ints(2, 0),
        state_loc_T=ints(-1, 0),
        source_SJ=ints(0, 1, -1, -1).view(2, 2),
        position_SJ=ints(1, 2, 3, 4).view(2, 2),
        start_S=ints(0, 3),
        accumulator_row_S=ints(0, 0),
        accumulator_loc_B=ints(0),
        folded_B=ints(3),
        entry_rope=turns(NO_TURN),
    )
    log_2 = math.log(2)
    own_TC = torch.tensor([[15.0, 23.0, log_2, log_2], [1.0, 2.0, 3.0, 4.0]])
    TorchCompress().fold(
        own_TC,
        ape_MC=torch.zeros(3, 2),
        norm=torch.tensor([1.0, 1.0]),
        eps=1e-30,
        plan=plan,
        target=target,
        rounding=Rounding.NONE,
    )
    # (3 + 7 + 2 * 15) / 4 = 10, (3 + 11 + 2 * 23) / 4 = 15
    wanted = torch.tensor([10.0, 15.0]) / math.sqrt((100 + 225) / 2)
    assert torch.allclose(target.entry_view.storage[0], wanted)
    # three tokens are folded, none of them in the window that is open now
    assert accumulators.storage[0, -1] == 3
    assert torch.equal(target.state_view.storage[0], own_TC[1])


def test_one_sinkhorn_step_normalises_columns_last() -> None:
    """softmax rows (1/2, 1/2) and (1/4, 3/4), then columns by 3/4 and 5/4."""
    logits_TNN = torch.tensor([[[0.0, 0.0], [0.0, math.log(3)]]])
    out_TNN = sinkhorn(logits_TNN, iterations=1, eps=0.0)
    assert torch.allclose(out_TNN, torch.tensor([[[2 / 3, 2 / 5], [1 / 3, 3 / 5]]]))
