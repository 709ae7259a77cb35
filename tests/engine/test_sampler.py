"""Sampling: the distribution, the nucleus, the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.engine.sampler import RequestSampler, draw, sample

PROBS = [0.1, 0.4, 0.2, 0.05, 0.25]
LOGITS = torch.tensor(PROBS).log()
BY_RANK = [1, 4, 2, 0, 3]


def sampler_of(**options: object) -> RequestSampler:
    defaults = {"temperature": 1.0, "top_p": 1.0, "seed": 0, "logprobs": 0}
    return RequestSampler(**{**defaults, **options})  # type: ignore[arg-type]


def masses(*, temperature: float, top_p: float, steps: int = 4000) -> list[float]:
    """Share of an even grid of uniforms that lands on each token."""
    hits = [0] * len(PROBS)
    for step in range(steps):
        uniform = (step + 0.5) / steps
        hits[int(draw(LOGITS, uniform, temperature=temperature, top_p=top_p))] += 1
    return [count / steps for count in hits]


def test_each_token_gets_its_probability() -> None:
    assert masses(temperature=1.0, top_p=1.0) == pytest.approx(PROBS, abs=1e-3)


def test_temperature_raises_probabilities_to_its_inverse() -> None:
    powers = [p**2 for p in PROBS]
    expected = [p / sum(powers) for p in powers]
    assert masses(temperature=0.5, top_p=1.0) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, 1), (0.39, 1), (0.41, 2), (0.64, 2), (0.66, 3), (0.96, 5), (1.0, 5)]
)
def test_the_nucleus_is_the_shortest_run_that_reaches_top_p(top_p: float, kept: int) -> None:
    nucleus = BY_RANK[:kept]
    total = sum(PROBS[i] for i in nucleus)
    expected = [p / total if i in nucleus else 0.0 for i, p in enumerate(PROBS)]
    assert masses(temperature=1.0, top_p=top_p) == pytest.approx(expected, abs=1e-3)


@given(
    st.lists(st.sampled_from([-math.inf, -90.0, 0.0, 1.0, 300.0]), min_size=1, max_size=9),
    st.floats(0.0, 1.0, exclude_max=True),
    st.floats(1e-300, 1e6),
    st.floats(1e-9, 1.0),
)
def test_an_impossible_token_is_never_drawn(
    values: list[float], uniform: float, temperature: float, top_p: float
) -> None:
    logits = torch.tensor([*values, 0.0])
    chosen = int(draw(logits, uniform, temperature=temperature, top_p=top_p))
    assert logits[chosen] > -math.inf


def test_a_tiny_temperature_and_a_tiny_nucleus_are_greedy() -> None:
    for uniform in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        assert int(draw(LOGITS, uniform, temperature=1e-300, top_p=1.0)) == 1
        assert int(draw(LOGITS, uniform, temperature=1.0, top_p=1e-12)) == 1


def test_of_equal_tokens_the_lower_id_ranks_first() -> None:
    logits = torch.zeros(4)
    drawn = [int(draw(logits, u, temperature=1.0, top_p=0.5)) for u in (0.0, 0.49, 0.51, 0.99)]
    assert drawn == [0, 0, 1, 1]


def test_a_row_is_sampled_alike_in_any_company() -> None:
    logits_BV = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    together = sample([(sampler_of(seed=b, logprobs=2), logits_BV[b]) for b in range(5)])
    for b in range(5):
        assert sample([(sampler_of(seed=b, logprobs=2), logits_BV[b])]) == [together[b]]


def test_no_rows_give_no_samples() -> None:
    assert sample([]) == []
