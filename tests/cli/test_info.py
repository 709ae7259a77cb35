"""dsv4 info."""

from __future__ import annotations

import json

import pytest

import dsv4
from dsv4 import registry
from tests.cli.conftest import Run


def test_it_lists_every_registered_part(run: Run) -> None:
    found = json.loads(run("info", "--json").out)
    assert found["versions"]["dsv4"] == dsv4.__version__
    assert set(found["pools"]) == set(registry.pool_names())
    assert set(found["kernels"]) == set(registry.kernel_set_names())
    torch_set = found["kernels"]["torch"]["cpu"]
    assert torch_set["usable"]
    assert torch_set["ops"]["attend"] == {"class": "TorchAttention", "why_not": None}


def test_a_broken_plug_in_is_reported_not_raised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = registry._targets

    def with_broken(group: str) -> dict[str, str]:
        return {**built_in(group), "broken": "no_such_module:Thing"}

    monkeypatch.setattr(registry, "_targets", with_broken)
    found = json.loads(run("info", "--json").out)
    assert "no_such_module" in found["kernels"]["broken"]["cpu"]["why_not"]
    assert "no_such_module" in found["pools"]["broken"]["why_not"]
    assert "no_such_module" in run("info").out
