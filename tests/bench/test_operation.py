"""Benchmarks of single operations on a CPU: small shapes, right numbers, and no time for a wrong result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4.bench.case import Setup
from dsv4.bench.ceilings import Ceilings, measure_ceilings
from dsv4.bench.operation import OPS, measure, setup_for, timer_for
from dsv4.bench.shapes import bench_model
from dsv4.bench.timing import Call, Timer
from dsv4.config import LayerKind
from dsv4.kernels.attend_ref import TorchAttention
from dsv4.kernels.compress_ref import TorchCompress
from dsv4.kernels.score_ref import TorchScore
from dsv4.kernels.select_ref import TorchSelect
from dsv4.kernels.store_ref import TorchStore
from dsv4.metadata.fill import TorchFill

CPU = torch.device("cpu")
CEILINGS = Ceilings(
    copy_gbs=4000.0, read_gbs=4400.0, matmul_tflops=800.0, fp8_matmul_tflops=None, empty_us=None
)


class Fixed(Timer):
    """Runs each call, and says that one takes 10 microseconds."""

    method = "fixed"
    max_calls = 2

    def samples(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
        return [10.0]


def setup(
    *, row_format: str = "bf16", index_format: str = "fp8", models: tuple[str, ...] = ("flash",)
) -> Setup:
    return setup_for(
        CPU, Fixed(), models=models, kernels="torch", batches=None, row_format=row_format,
        index_format=index_format, deterministic=False,
    )  # fmt: skip


@pytest.mark.parametrize("formats", [("bf16", "fp8"), ("fp8", "fp4"), ("fp32", "fp32")])
@pytest.mark.parametrize("op", OPS)
def test_every_case_is_right_and_measured(op: str, formats: tuple[str, str]) -> None:
    made = setup(row_format=formats[0], index_format=formats[1], models=("flash", "pro"))
    rows = list(measure(op, made, Fixed(), CEILINGS))
    assert rows
    assert len({(row["case"], row["size"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["time_us"] == 10.0
        assert row["error"] <= row["tolerance"]
        assert row["nbytes"] > 0
        assert row["gb_per_s"] == pytest.approx(row["nbytes"] / 10e3, abs=0.06)
        limit = max(row["nbytes"] / 4000e3, row["flop"] / 800e6)
        assert row["limit_us"] == pytest.approx(limit, abs=6e-4)
        assert row["fraction_of_limit"] == pytest.approx(limit / 10.0, abs=6e-5)
        assert row["bound"] == ("bytes" if limit == row["nbytes"] / 4000e3 else "flop")


def test_bytes_and_products_follow_the_formulas_of_the_peers() -> None:
    """FLOP = 4 * heads * rows * head dim * tokens; bytes = rows and their indices, queries and output."""
    model = bench_model("flash", small=True)
    heads, dim, rows = model.num_attention_heads, model.head_dim, model.sliding_window + 32
    found = {
        (row["case"], row["size"]): row for row in measure("attend", setup(), Fixed(), CEILINGS)
    }
    row = found["flash-csa", "b=3"]
    assert row["flop"] == 4 * heads * rows * dim * 3
    assert row["nbytes"] == 3 * (rows * (2 * dim + 4) + 2 * heads * dim * 2)


def test_only_chooses_cases_by_name() -> None:
    rows = list(measure("attend", setup(), Fixed(), CEILINGS, only="csa b=1"))
    assert [(row["case"], row["size"]) for row in rows] == [("flash-csa", "b=1")]


class HalfAttention(TorchAttention):
    def attend(self, *args: Any, out_THD: Tensor, **options: Any) -> None:
        super().attend(*args, out_THD=out_THD, **options)
        out_THD[-1, 0] *= 1.1


class LateStore(TorchStore):
    def store(self, q_THD: Tensor, kv_TD: Tensor, **options: Any) -> Tensor:
        options["store_loc_T"] = torch.full_like(options["store_loc_T"], -1)
        return super().store(q_THD, kv_TD, **options)


class SmallCompress(TorchCompress):
    def overlap(self, projected_TC: Tensor, **options: Any) -> None:
        super().overlap(projected_TC, **options | {"norm": options["norm"] * 1.1})

    def fold(self, projected_TC: Tensor, **options: Any) -> None:
        super().fold(projected_TC * 1.1, **options)


class BlindScore(TorchScore):
    def score(self, *args: Any, out_TN: Tensor, **options: Any) -> None:
        super().score(*args, out_TN=out_TN, **options)
        out_TN.nan_to_num_(neginf=0.0)


class WorstSelect(TorchSelect):
    def select(self, scores_TN: Tensor, *args: Any, **options: Any) -> None:
        super().select(-scores_TN, *args, **options)


class ShiftedFill(TorchFill):
    def fill(self, *args: Any) -> Any:
        shared = super().fill(*args)
        return attrs.evolve(shared, last_row_B=shared.last_row_B - 1)


@pytest.mark.parametrize(
    ("op", "faulty"),
    [
        ("attend", {"attend": HalfAttention()}),
        ("prefill", {"attend": HalfAttention()}),
        ("store", {"store": LateStore()}),
        ("compress", {"compress": SmallCompress()}),
        ("score", {"score": BlindScore()}),
        ("select", {"select": WorstSelect()}),
        ("fill", {"fill": ShiftedFill}),
    ],
)
def test_a_wrong_result_has_no_time(op: str, faulty: dict[str, Any]) -> None:
    made = setup()
    made = attrs.evolve(made, kernels=attrs.evolve(made.kernels, **faulty))
    rows = list(measure(op, made, Fixed(), CEILINGS))
    wrong = [row for row in rows if row["time_us"] is None]
    assert wrong
    for row in wrong:
        assert not row["error"] <= row["tolerance"]
        assert "gb_per_s" not in row


def test_published_shapes_are_those_of_the_releases() -> None:
    for name, heads, topk in (("flash", 64, 512), ("pro", 128, 1024)):
        model = bench_model(name, small=False)
        assert (model.num_attention_heads, model.head_dim, model.sliding_window) == (
            heads,
            512,
            128,
        )
        assert {layer.index_topk for layer in model.layers} == {0, topk}
        assert not any(layer.is_draft for layer in model.layers)


def test_small_shapes_have_every_kind_of_layer() -> None:
    for name in ("flash", "pro"):
        kinds = {layer.kind for layer in bench_model(name, small=True).layers}
        assert kinds == set(LayerKind)


def test_a_cpu_measures_its_ceilings_with_the_wall_clock() -> None:
    timer = timer_for(CPU)
    assert "small shapes" in timer.method
    found = measure_ceilings(CPU, timer)
    assert all(
        math.isfinite(x) and x > 0 for x in (found.copy_gbs, found.read_gbs, found.matmul_tflops)
    )
    assert (found.fp8_matmul_tflops, found.empty_us) == (None, None)


def test_the_limit_takes_fp8_products_where_they_were_measured() -> None:
    ceilings = attrs.evolve(CEILINGS, fp8_matmul_tflops=1600.0)
    assert ceilings.limit_us(8e6, 0.0) == pytest.approx(2.0)
    assert ceilings.limit_us(8e6, 16e9) == pytest.approx(20.0)
    assert ceilings.limit_us(8e6, 16e9, fp8=True) == pytest.approx(10.0)
    assert CEILINGS.limit_us(8e6, 16e9, fp8=True) == pytest.approx(20.0)
