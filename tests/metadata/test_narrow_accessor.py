"""What layers may not do, read off their source: compute an address, know a geometry, ask which pool there is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsv4

PACKAGE = Path(dsv4.__file__).resolve().parent
MODEL_FILES = sorted((PACKAGE / "model").glob("*.py"))
NARROW = {
    "LayerMetadata", "ForwardMetadata", "CompressorTarget", "ScoreInputs", "SelectOutput", "OverlapPlan", "FoldPlan",
    "IndexStream", "Source", "Workspace",
}  # fmt: skip
"""Types of metadata that model code may hold."""
COUNTS = {"tile_tokens"}
"""Fields that count tokens of this forward, no address: a loop over tiles may step by them."""


def modules(tree: ast.AST) -> Iterator[str]:
    """Every module and name that is imported, also under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def held(function: ast.FunctionDef) -> set[str]:
    """Names in a function that hold metadata: annotated parameters, and what is assigned from their fields."""
    names = {
        arg.arg
        for arg in [*function.args.args, *function.args.kwonlyargs]
        if arg.annotation is not None and NARROW & set(ast.unparse(arg.annotation).split(" | "))
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = zip(_parts(target), _parts(node.value), strict=False)
                names |= {
                    t.id for t, v in pairs if isinstance(t, ast.Name) and is_metadata(v, names)
                }
    return names


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def is_metadata(node: ast.AST, names: set[str]) -> bool:
    """A name that holds metadata, or a field, an item or an accessor of one."""
    if isinstance(node, ast.Name):
        return node.id in names or node.id in {"meta", "metadata"}
    if isinstance(node, ast.Attribute):
        return node.attr not in COUNTS and is_metadata(node.value, names)
    if isinstance(node, ast.Subscript | ast.Starred):
        return is_metadata(node.value, names)
    return False


def arithmetic(tree: ast.AST) -> Iterator[str]:
    """Expressions that compute with metadata."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = held(function)
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp):
                sides = [node.left, node.right]
            elif isinstance(node, ast.AugAssign):
                sides = [node.target, node.value]
            elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
                sides = [node.operand]
            else:
                continue
            if any(is_metadata(side, names) for side in sides):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_model_code_imports_no_geometry_and_no_pool_internals(path: Path) -> None:
    allowed = ("dsv4.pool.base",)
    wrong = [
        name
        for name in modules(ast.parse(path.read_text()))
        if "geometry" in name.lower()
        or "fill_ref" in name
        or (name.startswith("dsv4.pool") and not name.startswith(allowed))
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_model_code_does_no_arithmetic_on_what_it_reads(path: Path) -> None:
    assert list(arithmetic(ast.parse(path.read_text()))) == []


def test_the_walk_finds_arithmetic_where_there_is_some() -> None:
    source = """
def layer(meta: LayerMetadata, x, target: CompressorTarget | None):
    rows = meta.store_loc_T
    inputs, other = meta.score_inputs, x
    a = rows + 1
    b = meta.positions_T % 4
    rows[0] -= 2
    c = x + other
    d = first + inputs.tile_tokens
    e = target.entry_loc_E * 2
    f = -meta.sources[0].stream.indptr_T1
"""
    assert sorted(arithmetic(ast.parse(source))) == [
        "-meta.sources[0].stream.indptr_T1",
        "meta.positions_T % 4",
        "rows + 1",
        "rows[0] -= 2",
        "target.entry_loc_E * 2",
    ]


POOL_NAMES = {"unified", "three-pool", "three_pool", "UnifiedPool", "ThreePool"}
POOL_TYPES = {"UnifiedPool", "ThreePool", "UnifiedPoolConfig", "ThreePoolConfig"}
FREE = ("pool/", "cli/", "cli.py", "config/", "config.py", "registry.py")


def test_no_code_asks_which_pool_there_is() -> None:
    """The type of the config chooses the pool; only pools, configs, the registry and the command line know names."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        if where.startswith(FREE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.match_case):
                words = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
                if words & POOL_NAMES:
                    wrong.append(f"{where}: {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "isinstance",
                "issubclass",
            }:
                if POOL_TYPES & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
                    wrong.append(f"{where}: {ast.unparse(node)}")
    assert wrong == []


@pytest.mark.parametrize("name", ["fill.py", "fill_ref.py"])
def test_fill_asks_the_host_for_nothing(name: str) -> None:
    tree = ast.parse((PACKAGE / "metadata" / name).read_text())
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    syncing = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "any", "all"}
    assert called & syncing == set()
