"""Limits: what is within them, what is not."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dsv4.verify.prompts import random_sizes
from dsv4.verify.report import EXACT, PLAIN, STORED, Report, Tolerance, compare


def test_the_limit_grows_with_the_stored_value() -> None:
    want = torch.tensor([0.0, 100.0])
    at_limit = torch.tensor([4.9e-5, 100.01])
    assert compare("file", "x", at_limit, want, STORED).ok
    assert not compare("file", "x", at_limit, want, PLAIN).ok
    check = compare("file", "x", torch.tensor([1e-4, 100.0]), want, STORED)
    assert check.max_error == pytest.approx(1e-4)
    assert check.share == pytest.approx(2.0)


def test_exact_counts_the_elements_whose_bits_differ() -> None:
    want = torch.tensor([0.0, 1.0, math.nan])
    assert compare("file", "x", want.clone(), want, EXACT).ok
    check = compare("file", "x", torch.tensor([-0.0, 1.5, math.nan]), want, EXACT)
    assert (check.max_error, check.ok) == (2, False)
    assert not compare("file", "x", want.double(), want, EXACT).ok


def test_no_value_at_all_is_within_any_limit() -> None:
    assert compare("file", "x", torch.empty(0, 4), torch.empty(0, 4), STORED).ok
    assert not compare("file", "x", torch.empty(0, 3), torch.empty(0, 4), STORED).ok


def test_infinities_are_over_a_limit_unless_nothing_was_compared() -> None:
    assert not compare("file", "x", torch.tensor([math.inf]), torch.tensor([1.0]), STORED).ok
    assert not Report(checks=()).ok


def test_a_limit_reads_like_its_formula() -> None:
    assert [str(t) for t in (STORED, PLAIN, EXACT, Tolerance(relative=1e-5))] == [
        "5e-05 + 0.0001*|x|",
        "5e-05",
        "exact",
        "1e-05*|x|",
    ]


def test_random_chunkings_cover_the_prompt() -> None:
    chance = random.Random(0)
    for num_tokens in (1, 2, 3, 20, 270):
        for _ in range(50):
            sizes = random_sizes(num_tokens, chance)
            assert sum(sizes) == num_tokens
            assert min(sizes) >= 1
            assert num_tokens == 1 or len(sizes) > 1
