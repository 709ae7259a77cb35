"""Layers in bf16, one by one from their stored inputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dsv4.kernels.attend_ref import TorchAttention
from dsv4.verify import VerifyOptions, verify
from dsv4.verify.report import MOSTLY, REPORTED, compare

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
OPTIONS = VerifyOptions(pools=("unified",), dtype="bfloat16", kernels="torch")


@pytest.mark.parametrize("folder", ["tiny", "quant/qat"])
def test_every_layer_is_within_its_limit_and_logits_are_reported(folder: str) -> None:
    report = verify(GOLDEN / folder, OPTIONS)
    assert report.ok
    limited = {check.name for check in report.checks if check.tolerance == MOSTLY}
    assert {"prefill.attn_out.0", "prefill.attn_out.1", "prefill.attn_out.2"} <= limited
    reported = [check for check in report.checks if check.tolerance == REPORTED]
    assert reported
    assert all(0 < check.max_error < math.inf for check in reported)


def test_a_wrong_layer_is_over_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TorchAttention.attend

    def without_sink(self, q_THD, sources, sink_H, **options):  # type: ignore[no-untyped-def]
        whole(self, q_THD, sources, torch.full_like(sink_H, -torch.inf), **options)

    monkeypatch.setattr(TorchAttention, "attend", without_sink)
    report = verify(GOLDEN / "tiny", OPTIONS)
    assert any(check.name.startswith("prefill.attn_out") for check in report.failures)


def test_one_value_in_a_hundred_may_be_off_but_not_two() -> None:
    want = torch.ones(200)
    for off, ok in ((2, True), (3, False)):
        got = want.clone()
        got[:off] = 1.03
        assert compare("file", "name", got, want, MOSTLY).ok is ok


def test_a_nan_is_over_every_limit_of_most_values() -> None:
    got = torch.full((4,), torch.nan)
    assert not compare("file", "name", got, torch.ones(4), MOSTLY).ok
