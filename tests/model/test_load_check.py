"""The one line that says what is wrong with a checkpoint."""

from __future__ import annotations

import pytest

from dsv4.errors import CheckpointError
from dsv4.model.load_check import Problems


def test_five_names_of_a_kind_are_listed_and_the_others_counted() -> None:
    problems = Problems()
    for number in range(234):
        problems.add("unknown", f"w{number:03}")
    for number in range(5):
        problems.add("missing", f"m{number}")
    with pytest.raises(CheckpointError) as error:
        problems.raise_if_any("folder")
    assert "unknown (234): w000, w001, w002, w003, w004 and 229 more;" in str(error.value)
    assert "missing (5): m0, m1, m2, m3, m4;" in str(error.value)


def test_nothing_wrong_raises_nothing() -> None:
    Problems().raise_if_any("folder")
