"""The shipped checkpoint recalls a key from outside the window, and only the compressed entries can tell it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import dsv4
from dsv4.config import BackendConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import recall

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
TEXT = np.frombuffer(LICENSE.read_bytes(), np.uint8).astype(np.int16)
"""Between statement and ask: a text that never changes, and that training never saw."""


@pytest.mark.parametrize("pool", [UnifiedPoolConfig, ThreePoolConfig])
def test_a_key_four_windows_back_is_recalled_from_the_entries(pool: type[PoolConfig]) -> None:
    model = dsv4.load("tiny", backend=BackendConfig(pool=pool(max_requests=2, max_context=512)))
    distance = 4 * model.config.sliding_window
    found = recall.measure(Engine(model), TEXT, distance, trials=10)
    assert found["recall"] >= 0.9
    assert found["entries_zeroed"] < 0.2
