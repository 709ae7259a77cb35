"""Every kernel, in every configuration that a launcher can choose, builds for Hopper, Blackwell and two AMD GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsv4.triton_launch import TARGETS
from tests.kernels.compile_variants import all_variants, modules

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = 2
MOST_VARIANTS = 60
SPILLED: dict[tuple[str, str], int] = {
    # 255 registers, all that a thread may have (on AMD 337).
    ("attend-pro-parts", "sm_90"): 16,
    ("attend-pro-fp8", "sm_90"): 40,
    ("attend-pro-fp8-chunk", "sm_90"): 200,
    ("attend-pro-fp8-blackwell", "sm_100"): 488,
    ("attend-pro-fp8-hip", "gfx942"): 8,
    # 255 registers: a tile's rows wait in them while the next ones are on their way, which was faster on an H200.
    ("attend-flash-few", "sm_90"): 176,
    ("attend-flash-few", "sm_100"): 208,
    # Triton 3.6 only, far below the limit of registers: a stack frame, not lack of room.
    ("fill_decode_16", "sm_90"): 40,
    ("fill_decode_16", "sm_100"): 40,
    ("fill_prefill_16", "sm_90"): 32,
    ("fill_prefill_16", "sm_100"): 32,
}
"""(variant, target) -> bytes a thread may spill, where it is not 0: the most of triton 3.6.0 and 3.9.0."""


def names_on(target: str) -> Counter[str]:
    """A configuration may have other tiles and warps on another vendor's GPUs, under the same name."""
    return Counter(variant.name for variant in all_variants() if target in variant.targets)


@pytest.mark.parametrize("target", TARGETS)
def test_each_variant_of_a_gpu_has_its_own_name(target: str) -> None:
    assert [name for name, count in names_on(target).items() if count > 1] == []


@pytest.mark.xfail(reason="61 to 67 configurations, of compress, experts and select above all")
@pytest.mark.parametrize("target", TARGETS)
def test_a_gpu_sees_at_most_60_variants(target: str) -> None:
    assert names_on(target).total() <= MOST_VARIANTS


def test_every_kernel_is_in_a_table_of_variants() -> None:
    known = {variant.fn.__name__ for variant in all_variants()}
    kernels = {
        name
        for module in modules()
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    assert sorted(kernels - known) == []
    assert sorted(known - kernels) == [], "a kernel's name ends in _kernel"


def test_every_variant_names_each_argument_once() -> None:
    for variant in all_variants():
        given = [*variant.signature, *variant.constexprs]
        assert sorted(given) == sorted(variant.fn.arg_names), variant.name
        assert set(variant.aligned) <= set(variant.signature), variant.name


def test_every_variant_compiles_for_its_targets_within_shared_memory_and_without_spills(
    tmp_path: Path,
) -> None:
    reports = _compile_all(tmp_path)
    wanted = sum(len(variant.targets) for variant in all_variants())
    assert len(reports) == wanted, "a compiler process died"
    assert [problem for report in reports if (problem := _problem(report))] == []


def test_the_table_of_spills_names_variants_that_exist() -> None:
    known = {(variant.name, target) for variant in all_variants() for target in variant.targets}
    assert sorted(SPILLED.keys() - known) == []


def _problem(report: dict[str, Any]) -> str | None:
    name, target = report["variant"], report["target"]
    if "error" in report:
        return f"{name} for {target}: {report['error']}"
    if report["shared"] > TARGETS[target].shared_limit:
        return f"{name} for {target}: {report['shared']} bytes of shared memory"
    if report["spilled"] > SPILLED.get((name, target), 0):
        return f"{name} for {target}: {report['spilled']} bytes spilled"
    return None


def _compile_all(cache: Path) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_variants"]
    workers = [
        subprocess.Popen(
            [*command, str(part), str(WORKERS)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(WORKERS)
    ]
    lines = [line for worker in workers for line in worker.communicate()[0].splitlines()]
    return [json.loads(line) for line in lines]
