"""The structure of the library, read off its source: imports, the environment, length of files, host syncs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dsv4

PACKAGE = Path(dsv4.__file__).resolve().parent
ROOT = Path(__file__).resolve().parent.parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

LAYERS = (
    ("errors", "log"),
    ("quant", "registry", "triton_launch"),
    ("config",),
    ("tokenizer", "pool"),
    ("metadata",),
    ("kernels",),
    ("backend",),
    ("model",),
    ("engine",),
    ("testing", "verify"),
    ("bench",),
    ("cli",),
)
"""Parts of the library from the ground up: a part imports parts of lower rows."""
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
ABOVE = ("__init__", "__main__")
"""The public names and `python -m dsv4` stand on everything."""
LATE = {("pool", "metadata")}
"""Imported inside of a function alone: the pool names the builder that speaks its addresses."""


def statements(tree: ast.AST, *, lazy: bool) -> Iterator[ast.stmt]:
    """Statements that run on import; with `lazy`, function bodies too. Never blocks under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from statements(node, lazy=lazy)


def imported(tree: ast.AST, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names of what is imported: modules, or `module.name`."""
    for node in statements(tree, lazy=lazy):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str:
    """`pool` of pool/tables.py, `quant` of quant.py."""
    return name.removesuffix(".py").split("/")[0]


def module_of(dotted: str) -> str | None:
    """The file of the library that an imported name is in."""
    parts = dotted.split(".")
    if parts[0] != "dsv4":
        return None
    for end in range(len(parts), 0, -1):
        stem = "/".join(parts[1:end])
        for name in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
            if name in FILES:
                return name
    return None


@pytest.mark.parametrize("name", FILES)
def test_imports_lead_to_lower_parts(name: str) -> None:
    part = part_of(name)
    if part in ABOVE:
        return
    tools = RANK[part] >= RANK["bench"]  # use the public names like any other program
    used = {part_of(module) for dotted in imported(TREES[name]) if (module := module_of(dotted))}
    late = {other for this, other in LATE if this == part}
    upwards = {
        other
        for other in used - {part} - late
        if (not tools if other in ABOVE else RANK[other] >= RANK[part])
    }
    assert upwards == set()


def test_every_part_has_its_place() -> None:
    assert {part_of(name) for name in FILES} == {*RANK, *ABOVE}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {
        name: {
            module
            for dotted in imported(tree, lazy=False)
            if (module := module_of(dotted)) not in (None, name)
        }
        for name, tree in TREES.items()
    }
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(FILES)


def test_no_file_is_longer_than_500_lines() -> None:
    folders = (PACKAGE, *(ROOT / name for name in ("tests", "examples", "benchmarks")))
    long = {
        path.name: lines
        for folder in folders
        for path in folder.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


def test_only_kernel_files_of_gpus_import_triton() -> None:
    named = {
        name
        for name, tree in TREES.items()
        if any(dotted.split(".")[0] == "triton" for dotted in imported(tree))
    }
    assert {name for name in named if not name.endswith(("_triton.py", "_hopper.py"))} == {
        "triton_launch.py"
    }


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
    }
    assert readers == {"config/environment.py"}


def test_kernels_never_ask_the_host() -> None:
    """The torch experts are the exception, and say so: which tokens chose an expert decides shapes there."""
    asking = {
        f"{name}: {node.func.attr}"
        for name, tree in TREES.items()
        if name.startswith("kernels/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select"}
    }
    assert asking == {"kernels/experts_ref.py: tolist"}
