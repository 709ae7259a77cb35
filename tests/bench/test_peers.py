"""The recorded peers, against the table that they were taken from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4.bench import peers
from dsv4.bench.peers import BATCHES, batch_size, peers_of

# A few cells, copied by hand.
CELLS = [
    ("attend", "flash-csa", "b=1", {"FlashMLA fp8": 13.4, "ATOM Triton": 12.5}),
    ("attend", "flash-csa", "b=8", {"FlashMLA fp8": 15.4, "ATOM Triton, tuned": 17.2}),
    ("attend", "pro-hca128k", "b=512", {"FlashMLA fp8": 403.7, "FlashMLA bf16 prefill kernel": 292.9}),
    ("score", "flash", "64 x 32,768", {"DeepGEMM fp8": 75.3, "plain Triton fp8": 77.5, "plain Triton bf16": 139}),
    ("select", "flash", "8 x 262,144", {"SGLang": 12}),
    ("select", "flash", "4,096 x 32,768", {"SGLang": 212, "FlashInfer": 578, "torch": 1616}),
    ("fill", "flash", "b=1", {}),
    ("select", "pro", "8 x 262,144", {}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "case", "size", "wanted"), CELLS)
def test_a_cell_is_as_recorded(op: str, case: str, size: str, wanted: dict[str, float]) -> None:
    assert peers_of(op, case, size) == wanted


def test_every_decode_cell_is_the_documents(shared: Path) -> None:
    text = (shared / "design" / "peers_h200.md").read_text(encoding="utf-8")
    table = text.split("## Decode")[1].split("Readings:")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if len(row) == 11 and row[0].startswith(("flash-", "pro-"))]
    assert len(rows) == 16
    for case, _, _, what, *cells in rows:
        for batch, cell in zip(BATCHES, cells, strict=True):
            match = re.match(r"([\d.]+)(P|A\*|A)? ", cell)
            assert match
            mark = peers._MARKS[match[2]] if match[2] else peers.FLASHMLA_FP8
            assert (match[2] is None) == (what == "FlashMLA fp8")
            assert peers_of("attend", case, batch_size(batch))[mark] == float(match[1])


def test_names_are_those_of_the_cases_that_are_measured() -> None:
    """A renamed case would silently lose its peers."""
    from dsv4.bench import attend, score, select
    from dsv4.bench.shapes import bench_model

    sizes = {shape.size for shape in score.SHAPES}
    assert sizes == {size for _, size in peers._TABLES["score"]}
    assert {f"{t:,} x {n:,}" for t, n in select.SHAPES} == {s for _, s in peers._TABLES["select"]}
    for name in ("flash", "pro"):
        model = bench_model(name, small=False)
        for kind in attend.contexts(model, small=False):
            for batch in BATCHES:
                assert peers_of("attend", f"{name}-{kind}", batch_size(batch))
        for kind in ("context", "scattered"):
            assert peers_of("prefill", f"{name}-{kind}", "4,096 tokens")
