"""Which scenario a test stands for: `@scenario("B", 4)`, class and number of the list of public faults."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])
FOLDER = Path(__file__).parent


def scenario(letter: str, *numbers: int) -> Callable[[Test], Test]:
    """Says that the test shows these scenarios of class `letter`; see test_table.py."""

    def keep(test: Test) -> Test:
        test.scenarios = [(letter, number) for number in numbers]  # type: ignore[attr-defined]
        return test

    return keep


def covered() -> dict[int, list[tuple[str, str]]]:
    """Number -> (class, `file::test`) of every test in this folder that names it. Read from the sources."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        for letter, number, name in _marks(ast.parse(path.read_text())):
            found.setdefault(number, []).append((letter, f"{path.name}::{name}"))
    return found


def _marks(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name):
                if mark.func.id == "scenario":
                    letter, *numbers = (ast.literal_eval(argument) for argument in mark.args)
                    yield from ((letter, number, node.name) for number in numbers)
