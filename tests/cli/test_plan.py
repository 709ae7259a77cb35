"""dsv4 plan, against the bytes of what is then allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4 import Backend, BackendConfig, ModelConfig
from dsv4.registry import pool_config_class
from tests.cli.conftest import Run

POOLS = ("unified", "three-pool")


@pytest.mark.parametrize("pool", POOLS)
def test_the_planned_bytes_are_those_of_the_allocated_tensors(
    run: Run, golden: Path, pool: str
) -> None:
    config = golden / "tiny" / "config.json"
    words = ("--model", config, "--memory", "8MB", "--max-requests", 3, "--pool", pool, "--json")
    outcome = run("plan", *words)
    plan = json.loads(outcome.out)
    (fit,) = plan["fits"]
    assert fit["max_requests"] == 3
    assert fit["nbytes"] <= 8_000_000

    def allocated(max_context: int) -> int:
        chosen = pool_config_class(pool)(max_requests=3, max_context=max_context)
        backend = Backend.from_config(ModelConfig.from_json(config), BackendConfig(pool=chosen))
        tables = {part.table: part.nbytes for part in backend.pool.components()}
        return sum(tables.values()) + sum(backend.builder.nbytes().values())

    assert allocated(fit["max_context"]) == fit["nbytes"]
    assert sum(plan["components"]["nbytes"].values()) == fit["nbytes"]
    assert allocated(fit["max_context"] + plan["components"]["of"]["max_context"]) > 8_000_000


def test_released_models_print_a_table(run: Run) -> None:
    outcome = run("plan", "--model", "flash", "--memory", "80GiB", "--row-format", "fp8")
    assert outcome.status == 0
    assert "per token" in outcome.out
    assert "requests  context of each" in outcome.out


def test_drafts_cost_memory(run: Run) -> None:
    words = ("plan", "--model", "flash", "--memory", "1GiB", "--max-requests", 2, "--json")
    with_drafts, without = (
        json.loads(run(*words, *more).out)["bytes_per_slot"] for more in ((), ("--without-drafts",))
    )
    # one ring of 128 bf16 rows of 512, and four fp32 streams of 4096
    assert with_drafts - without == 128 * 512 * 2 + 4 * 4096 * 4


def test_a_context_asks_for_the_most_requests(run: Run) -> None:
    words = ("plan", "--model", "tiny", "--memory", "64MB", "--json")
    most = json.loads(run(*words, "--max-context", "4K").out)["fits"][0]
    assert most["max_context"] == 4096
    assert most["nbytes"] <= 64_000_000
    one_more = run(
        "plan", "--model", "tiny", "--memory", "64MB", "--max-context", "4K",
        "--max-requests", most["max_requests"] + 1,
    )  # fmt: skip
    assert "64MB" in one_more.error or "memory" in one_more.error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model", "flash", "--memory", "80 gigs"), "80 gigs"),
        (("--model", "flash", "--memory", "1KiB"), "1 KiB"),
        (("--model", "flsh", "--memory", "1GiB"), "'flsh'"),
        (("--model", "flash", "--memory", "1GiB", "--pool", "five"), "'five'"),
        (("--model", "flash", "--memory", "1GiB", "--row-format", "fp9"), "fp9"),
    ],
)
def test_bad_input_is_one_line_that_names_it(run: Run, words: tuple[str, ...], named: str) -> None:
    assert named in run("plan", *words).error
