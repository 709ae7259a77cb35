"""Renders recorded results into the pages that quote them, so that no number is copied by hand.

    python benchmarks/tables.py           # rewrites the blocks of README.md and docs/*.md
    python benchmarks/tables.py --check   # changes nothing, exit status 1 if a page is out of date

A block names a record of benchmarks/results, and the columns to show (all if none are named):

    <!-- results:step-cpu what,batch,prompt_tokens,tokens_per_second -->
    ... replaced by the table ...
    <!-- end -->

A record is `{"machine", "versions", "command", "date", "rows": [{...}, ...]}`, as `dsv4 bench --out` writes it. Every
table ends with a line that says on which machine, with which versions, when and by which command it was made.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^(?P<head><!-- results:(?P<name>[\w.-]+)(?: (?P<columns>[\w,]+))? -->)\n"
    r"(?P<body>.*?)^(?P<end><!-- end -->)$",
    re.MULTILINE | re.DOTALL,
)
MARKS = re.compile(r"^<!-- (?:results:.*|end) -->$", re.MULTILINE)


class TableError(Exception):
    """A page or a record cannot be rendered; the message is one line."""


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may hold blocks."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(page: str, results: Path) -> str:
    """The page with every block made from its record. Raises TableError."""
    marks = len(MARKS.findall(page))
    if marks != 2 * len(BLOCK.findall(page)):
        raise TableError(f"{marks} marks do not pair up; write results:NAME, then end")

    def block(match: re.Match[str]) -> str:
        columns = match["columns"].split(",") if match["columns"] else None
        body = table(load(results / f"{match['name']}.json"), columns, match["name"])
        return f"{match['head']}\n{body}\n{match['end']}"

    return BLOCK.sub(block, page)


def load(path: Path) -> Mapping[str, object]:
    try:
        record: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: no record ({error})") from error
    missing = {"machine", "versions", "command", "date", "rows"} - set(record)
    if missing or not record["rows"]:
        raise TableError(f"{path}: lacks {', '.join(sorted(missing)) or 'rows'}")
    return record


def table(record: Mapping[str, object], columns: Sequence[str] | None, name: str) -> str:
    """A Markdown table of the rows, and the line that says where they come from."""
    rows = record["rows"]
    assert isinstance(rows, list)
    known = list(dict.fromkeys(key for row in rows for key in row))
    shown = list(columns or known)
    unknown = [column for column in shown if column not in known]
    if unknown:
        raise TableError(f"{name}: no column {', '.join(unknown)}; there are {', '.join(known)}")
    aligns = [all(_is_number(row.get(column)) for row in rows) for column in shown]
    lines = [
        _line(column.replace("_", " ") for column in shown),
        _line("---:" if right else "---" for right in aligns),
        *(_line(text(row.get(column)) for column in shown) for row in rows),
        "",
        source(record),
    ]
    return "\n".join(lines)


def source(record: Mapping[str, object]) -> str:
    """Machine, versions, date and command, as one line."""
    parts = [_flat(record["machine"]), _flat(record["versions"]), str(record["date"])]
    return f"{'; '.join(parts)}; `{record['command']}`"


def text(value: object) -> str:
    """A cell: counts with separators, measurements with four significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return str(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """0, 1 if `--check` finds a page out of date, 2 if a page cannot be rendered."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report")
    args = parser.parse_args(argv)
    stale = []
    for path in pages(root):
        page = path.read_text(encoding="utf-8")
        try:
            rendered = render(page, root / "benchmarks" / "results")
        except TableError as error:
            print(f"tables: error: {path}: {error}", file=sys.stderr)
            return 2
        if rendered != page:
            stale.append(path)
            if not args.check:
                path.write_text(rendered, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(root)}: {'out of date' if args.check else 'rewritten'}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
