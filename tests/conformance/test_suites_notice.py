"""The suites are no formality: an implementation with a fault fails the test of the promise that it breaks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BROKEN = {
    "TestForgetful": ["test_03_slots_are_reused_state_is_not"],
    "TestHalfFork": ["test_08_a_fork_continues_exactly_like_its_source"],
    "TestGenerous": ["test_07_rollback_works_iff_within_the_margin", "test_07_nothing_below"],
    "TestLeaky": ["test_02_estimate_equals", "test_04_reserve_makes_positions"],
    "TestStale": ["test_2_fill_has_no_effect", "test_6_swa_loc_for_is_exact"],
    "TestUnroundedFresh": ["test_3_fresh_holds_exactly", "test_4_rows_are_written_only"],
    "TestEagerState": ["test_2_state_is_written_after", "test_3_entries_are_written_only"],
    "TestOpenScore": ["test_1_score", "test_2_other_lanes"],
    "TestLateSelect": ["test_2_nan"],
    "TestTwoSinks": ["test_2_the_sink", "test_4_an_index"],
    "TestBoastfulLinear": ["test_2_a_rows_bits"],
    "TestShortMix": ["test_1_and_2_pre"],
    "TestCastFirst": ["test_1_the_one_cast"],
    "TestUnclampedExperts": ["test_2_y_is", "test_2_the_clamp"],
}


def failures() -> set[str]:
    """Class::test of everything that fails in faulty.py, from one run of its own."""
    wanted = " or ".join(sorted({name for names in BROKEN.values() for name in names}))
    command = [
        sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly",
        "-c", str(ROOT / "pyproject.toml"), "-k", wanted, str(Path(__file__).with_name("faulty.py")),
    ]  # fmt: skip
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    environment["OMP_NUM_THREADS"] = "1"
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    return set(re.findall(r"^FAILED \S+?::(\w+::\w+)", run.stdout, re.MULTILINE))


def test_a_broken_promise_fails_its_test() -> None:
    failed = failures()
    unnoticed = [
        f"{suite}::{test}"
        for suite, tests in BROKEN.items()
        for test in tests
        if not any(name.startswith(f"{suite}::{test}") for name in failed)
    ]
    assert unnoticed == []
