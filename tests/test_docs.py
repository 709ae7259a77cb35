"""What README and docs show is true: code runs, commands parse, names exist, tables are those of the records."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import tables
from dsv4.backend import Backend
from dsv4.cli import build_parser
from dsv4.config import BackendConfig, ModelConfig, ThreePoolConfig, UnifiedPoolConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = tables.pages(ROOT)
CHECKPOINT = ROOT / "dsv4" / "data" / "tiny" / "config.json"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#([^)\s]*))?\)")
CODE = re.compile(r"`([^`\n]+)`")
TEST_NAME = re.compile(r"(?P<file>[\w/.-]+\.py)::(?P<test>[\w:]+)")
DOTTED = re.compile(r"dsv4(?:\.[A-Za-z_]\w*)+")
FILE_NAME = re.compile(r"(?:dsv4|tests|examples|benchmarks|docs)/[\w/.*-]*")


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text()) if name == language]


def code_spans(page: Path) -> Iterator[str]:
    """Inline code outside of fenced blocks."""
    yield from CODE.findall(FENCE.sub("", page.read_text()))


def needs_checkpoint(code: str) -> bool:
    return "dsv4.load(" in code


def page_id(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Examples read sys.argv and may write files.
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    for code in blocks(page, "python"):
        if needs_checkpoint(code) and not CHECKPOINT.is_file():
            continue
        exec(compile(code, str(page), "exec"), names)


def test_the_example_of_the_readme_is_the_example_file_and_has_12_lines() -> None:
    source = (ROOT / "examples" / "compose_backend.py").read_text()
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    body = source.split(f'"""{docstring}"""', 1)[1].strip("\n") + "\n"
    assert body in blocks(ROOT / "README.md", "python")
    assert body.count("\n") == 12


def test_the_bytes_of_the_pools_in_the_readme_are_those_of_the_plan() -> None:
    readme = (ROOT / "README.md").read_text()
    flash = ModelConfig.preset("flash")
    for kind in ("token", "slot"):
        (line,) = re.findall(rf"^\| bytes per {kind}, .*$", readme, re.MULTILINE)
        _, *cells = line.strip("| ").split(" | ")
        for cell, pool_type in zip(cells, (UnifiedPoolConfig, ThreePoolConfig), strict=True):
            for number, rows in zip(cell.split(" / "), ("bf16", "fp8"), strict=True):
                pool = pool_type(max_requests=187, max_context=65_536, row_format=rows)
                report = Backend.estimate(flash, BackendConfig(pool=pool))
                assert number == f"{getattr(report, f'bytes_per_{kind}'):,.0f}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_config_file_of_a_page_loads(page: Path, tmp_path: Path) -> None:
    for code in blocks(page, "toml"):
        (tmp_path / "backend.toml").write_text(code)
        BackendConfig.load(tmp_path / "backend.toml")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_of_a_page_is_one_that_the_parser_takes(page: Path) -> None:
    lines = [line for code in blocks(page, "sh") for line in code.splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["dsv4"]:
            build_parser().parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith("https://"):
            continue
        path = (page.parent / target).resolve()
        assert path.exists(), target
        assert path.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for span in code_spans(page):
        match = TEST_NAME.fullmatch(span)
        if match:
            assert match["test"].split("::")[-1] in functions(ROOT / match["file"]), span


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_name_and_file_that_a_page_mentions_exists(page: Path) -> None:
    for span in code_spans(page):
        if FILE_NAME.fullmatch(span):
            assert list(ROOT.glob(span)), span
        elif DOTTED.fullmatch(span.removesuffix("()")) and not span.startswith("dsv4.pools"):
            assert resolves(span.removesuffix("()")), span


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    found: object = importlib.import_module("dsv4")
    parts = name.split(".")
    for at, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join(parts[:at]))
            except ImportError:
                # attrs fields without a default are no attributes of their class
                return part in getattr(found, "__annotations__", {})
        else:
            found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_table_of_results_is_that_of_its_record(page: Path) -> None:
    text = page.read_text()
    assert tables.render(text, ROOT / "benchmarks" / "results") == text


RECORD = {
    "machine": {"cpu": "A CPU", "cores": 2},
    "versions": {"torch": "2.13.0"},
    "command": "dsv4 bench step",
    "date": "2026-01-02 03:04 UTC",
    "rows": [
        {"what": "prefill", "prompt_tokens": 1024, "tokens_per_second": 12345.6, "exact": True},
        {"what": "a|b", "prompt_tokens": 64, "tokens_per_second": 1.23456, "exact": False},
    ],
}
RENDERED = """\
| what | prompt tokens | tokens per second | exact |
| --- | ---: | ---: | --- |
| prefill | 1,024 | 12,346 | yes |
| a\\|b | 64 | 1.235 | no |

cpu A CPU, cores 2; torch 2.13.0; 2026-01-02 03:04 UTC; `dsv4 bench step`"""


def project(folder: Path, page: str) -> Path:
    results = folder / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "step.json").write_text(json.dumps(RECORD))
    (folder / "docs").mkdir()
    (folder / "README.md").write_text(page)
    return folder


def test_a_block_becomes_the_table_of_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "before\n<!-- results:step -->\nold\n<!-- end -->\nafter\n"
    root = project(tmp_path, page)
    assert tables.main(["--check"], root) == 1
    assert (root / "README.md").read_text() == page
    assert capsys.readouterr().out == "README.md: out of date\n"
    assert tables.main([], root) == 0
    wanted = f"before\n<!-- results:step -->\n{RENDERED}\n<!-- end -->\nafter\n"
    assert (root / "README.md").read_text() == wanted
    assert tables.main(["--check"], root) == 0


def test_a_block_may_choose_its_columns(tmp_path: Path) -> None:
    head = "<!-- results:step prompt_tokens,what -->"
    root = project(tmp_path, f"{head}\n<!-- end -->\n")
    assert tables.main([], root) == 0
    lines = (root / "README.md").read_text().splitlines()
    assert lines[:4] == [head, "| prompt tokens | what |", "| ---: | --- |", "| 1,024 | prefill |"]


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<!-- results:step -->\nno end\n", "1 marks do not pair up"),
        ("<!-- results:step speed -->\n<!-- end -->\n", "no column speed; there are what"),
        ("<!-- results:absent -->\n<!-- end -->\n", "absent.json: no record"),
    ],
)
def test_a_block_that_cannot_be_rendered_is_one_line(
    tmp_path: Path, page: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project(tmp_path, page)
    assert tables.main([], root) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert (root / "README.md").read_text() == page
