"""Experts of one MoE layer in bf16: few tokens read the weights of the experts they chose, many share them.

Legend: T tokens, D hidden, K experts a token, E experts, I inner.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from dsv4.bench.case import Case, Setup, largest_error
from dsv4.bench.peers import batch_size
from dsv4.config import ModelConfig
from dsv4.kernels.base import ExpertWeights

CHUNK, SMALL_CHUNK = 4096, 24
MAX_CALLS = 16
CHECKED_TOKENS = 8
TOLERANCE = 3e-2
"""Gate, up, inner vector and each expert's output are rounded to bf16 on the way."""


@frozen(kw_only=True, eq=False)
class _Inputs:
    x_TD: Tensor
    chosen_TK: Tensor
    weights_TK: Tensor


def cases(setup: Setup) -> Iterator[Case]:
    """Decode batches and one chunk; routes are random."""
    chunk = SMALL_CHUNK if setup.small else CHUNK
    for name, model in setup.models.items():
        weights = _weights(setup, model)
        for tokens in setup.batches:
            yield _case(setup, model, weights, name, batch_size(tokens), tokens)
        yield _case(setup, model, weights, name, f"{chunk:,} tokens", chunk)


def _weights(setup: Setup, model: ModelConfig) -> ExpertWeights:
    experts, hidden, inner = (
        model.n_routed_experts, model.hidden_size, model.moe_intermediate_size
    )  # fmt: skip
    up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device=setup.device)
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device=setup.device)
    up.normal_(0, hidden**-0.5)
    down.normal_(0, inner**-0.5)
    return ExpertWeights(up, down, up[0].clone(), down[0].clone())


def _case(
    setup: Setup, model: ModelConfig, weights: ExpertWeights, name: str, size: str, tokens: int
) -> Case:
    inputs = [_inputs(setup, model, tokens) for _ in range(min(setup.max_calls, MAX_CALLS))]

    def run(one: _Inputs) -> Tensor:
        return setup.kernels.experts.experts(
            one.x_TD, one.chosen_TK, one.weights_TK, weights, limit=model.swiglu_limit
        )

    def check() -> float:
        return _error(model, weights, inputs[0], run(inputs[0]))

    expert_values = 3.0 * model.moe_intermediate_size * model.hidden_size
    touched = sum(torch.unique(one.chosen_TK).numel() for one in inputs) / len(inputs)
    return Case(
        name=name,
        size=size,
        calls=[functools.partial(run, one) for one in inputs],
        check=check,
        tolerance=TOLERANCE,
        nbytes=2.0 * (expert_values * (touched + 1) + 2 * tokens * model.hidden_size),
        flop=2.0 * expert_values * tokens * (model.num_experts_per_tok + 1),
    )


def _inputs(setup: Setup, model: ModelConfig, tokens: int) -> _Inputs:
    scores_TE = torch.rand(tokens, model.n_routed_experts, device=setup.device)
    weights_TK, chosen_TK = scores_TE.topk(model.num_experts_per_tok)
    return _Inputs(
        x_TD=setup.randn(tokens, model.hidden_size),
        chosen_TK=chosen_TK.int(),
        weights_TK=weights_TK / weights_TK.sum(-1, keepdim=True) * model.routed_scaling_factor,
    )


def _error(model: ModelConfig, weights: ExpertWeights, one: _Inputs, y_TD: Tensor) -> float:
    """Of the last tokens: theirs are the last rows of every expert."""
    worst = 0.0
    for t in range(max(0, y_TD.shape[0] - CHECKED_TOKENS), y_TD.shape[0]):
        picks = zip(one.chosen_TK[t].tolist(), one.weights_TK[t].tolist(), strict=True)
        parts = [(weights.w13_EID[e], weights.w2_EDI[e], p) for e, p in picks]
        parts.append((weights.shared_w13, weights.shared_w2, 1.0))
        wanted = sum(_expert64(one.x_TD[t], *part, model.swiglu_limit) for part in parts)
        assert isinstance(wanted, Tensor)
        worst = max(worst, largest_error(y_TD[t], wanted))
    return worst


def _expert64(x: Tensor, w13: Tensor, w2: Tensor, weight: float, limit: float) -> Tensor:
    gate, up = (w13.double() @ x.double()).chunk(2)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return w2.double() @ (gate * gate.sigmoid() * up * weight)
