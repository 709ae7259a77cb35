"""The pooling fold: equal to a softmax, exact at its edges, the same bits in any company."""

import math

import torch

from dsv4.pool.fold import fold_step


def empty_fold(gate_C: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(max, sum, weighted sum) before the first token."""
    return torch.full_like(gate_C, -torch.inf), torch.zeros_like(gate_C), torch.zeros_like(gate_C)


def fold(gate_TC: torch.Tensor, value_TC: torch.Tensor) -> tuple[torch.Tensor, ...]:
    state = empty_fold(gate_TC[0])
    for gate_C, value_C in zip(gate_TC, value_TC, strict=True):
        state = fold_step(*state, gate_C, value_C)
    return state


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale


def test_a_fold_is_the_softmax_average() -> None:
    gate_TC, value_TC = random(128, 40, scale=5.0).double(), random(128, 40).double()
    _, sum_C, weighted_C = fold(gate_TC, value_TC)
    expected_C = (gate_TC.softmax(0) * value_TC).sum(0)
    torch.testing.assert_close(weighted_C / sum_C, expected_C, rtol=1e-12, atol=1e-12)


def test_the_first_step_gives_the_token_itself() -> None:
    gate_C, value_C = random(300, scale=60.0), random(300, scale=1e30)
    max_C, sum_C, weighted_C = fold_step(*empty_fold(gate_C), gate_C, value_C)
    assert torch.equal(max_C, gate_C)
    assert torch.equal(sum_C, torch.ones(300))
    assert torch.equal(weighted_C, value_C)


def test_a_masked_token_changes_no_bit_whatever_it_holds() -> None:
    state = fold(random(5, 64, scale=9.0), random(5, 64))
    state[2][0] = -0.0
    masked_C = torch.full((64,), -math.inf)
    for value_C in (torch.full((64,), math.nan), torch.full((64,), math.inf), torch.zeros(64)):
        for before, after in zip(state, fold_step(*state, masked_C, value_C), strict=True):
            assert torch.equal(before.view(torch.int32), after.view(torch.int32))


def test_masked_tokens_leave_an_empty_fold_empty() -> None:
    masked_TC = torch.full((3, 8), -math.inf)
    max_C, sum_C, weighted_C = fold(masked_TC, random(3, 8))
    assert (max_C == -math.inf).all()
    assert (sum_C == 0).all()
    assert (weighted_C == 0).all()


def test_gates_far_apart_neither_overflow_nor_vanish() -> None:
    gate_TC = torch.tensor([[-3e38], [0.0], [3e38]])
    max_C, sum_C, weighted_C = fold(gate_TC, torch.tensor([[1.0], [2.0], [3.0]]))
    assert (max_C.item(), sum_C.item(), weighted_C.item()) == (gate_TC[2].item(), 1.0, 3.0)


def test_a_channel_has_the_same_bits_alone_and_in_any_batch() -> None:
    gate_TBC, value_TBC = random(9, 7, 33, scale=4.0), random(9, 7, 33)
    together = fold(gate_TBC, value_TBC)
    strided = fold(gate_TBC.transpose(1, 2), value_TBC.transpose(1, 2))
    for request in range(7):
        alone = fold(gate_TBC[:, request].contiguous(), value_TBC[:, request].contiguous())
        for batch, other, single in zip(together, strided, alone, strict=True):
            assert torch.equal(batch[request], single)
            assert torch.equal(other[:, request], single)
