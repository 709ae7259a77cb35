"""dsv4 verify: a golden folder, tensor by tensor, on both pools."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from dsv4.cli.arguments import (
    Commands,
    add_command,
    add_compute,
    add_json,
    add_pool,
    add_row_format,
    add_threads,
    aligned,
    print_json,
    set_threads,
)
from dsv4.config import ModelConfig
from dsv4.verify import Check, Job, Report, VerifyOptions, verify
from dsv4.verify.golden import CONFIG, golden_folders
from dsv4.verify.report import EXACT

MOST_FAILURES = 10
"""Failures printed one by one; --json has them all."""
MOST_SHARE = 10.0
"""Shares of a limit above this are printed as such: the digits would say nothing."""
_RANDOM = re.compile(r"random\d+")


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "verify",
        run,
        "check every tensor of a golden folder: prefill inside and out, decode, chunkings, drafts, number formats; "
        "with --dtype bfloat16 each layer from its stored input",
    )
    parser.add_argument(
        "golden",
        metavar="GOLDEN_DIR",
        help="folder of config.json, weights and prompts, or one that holds such folders",
    )
    add_pool(parser, default=None)
    add_row_format(parser)
    add_compute(parser, dtype="float32")
    add_threads(parser)
    parser.add_argument(
        "--chunkings",
        type=int,
        default=VerifyOptions().chunkings,
        metavar="N",
        help="random ways to cut each prompt into chunks (default: %(default)s)",
    )
    parser.add_argument(
        "--longest",
        type=int,
        metavar="N",
        help="leave out prompts of more than N tokens (default: none)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0 if every tensor is within its limit, else 1."""
    defaults = VerifyOptions()
    options = VerifyOptions(
        pools=(args.pool,) if args.pool else defaults.pools,
        kernels=args.kernels,
        row_format=args.row_format,
        dtype=args.dtype,
        device=args.device,
        chunkings=args.chunkings,
        deterministic=args.deterministic,
        longest=args.longest,
    )
    set_threads(args, _widest(Path(args.golden)))
    report = verify(args.golden, options, _progress)
    _warn_of_rounded_rows(args)
    if args.json:
        print_json(_document(args, options, report))
    else:
        _print_tables(report)
    return 0 if report.ok else 1


def _widest(path: Path) -> int:
    """The largest hidden_size of the golden models; 0 for number formats alone."""
    configs = [folder / CONFIG for folder in golden_folders(path)]
    return max((ModelConfig.from_json(c).hidden_size for c in configs if c.is_file()), default=0)


def _warn_of_rounded_rows(args: argparse.Namespace) -> None:
    if args.row_format not in ("auto", "fp32") and args.dtype != "bfloat16":
        print(
            f"dsv4: warning: --row-format {args.row_format}: the limits are for fp32 rows and float32 activations; "
            "rounded ones exceed them",
            file=sys.stderr,
        )


def _progress(jobs: Iterable[Job]) -> Iterator[Job]:
    # disable=None: no bar unless standard error is a terminal.
    bar = tqdm(list(jobs), desc="verify", unit="file", disable=None, leave=False)
    for job in bar:
        bar.set_postfix_str(job.title)
        yield job


def _document(
    args: argparse.Namespace, options: VerifyOptions, report: Report
) -> dict[str, object]:
    return {
        "golden": args.golden,
        "ok": report.ok,
        "num_checks": len(report.checks),
        "num_failed": len(report.failures),
        "pools": list(options.pools),
        "kernels": options.kernels,
        "row_format": options.row_format,
        "dtype": options.dtype,
        "chunkings": options.chunkings,
        "deterministic": options.deterministic,
        "longest": options.longest,
        "tensors": [_row(check) for check in report.checks],
    }


def _row(check: Check) -> dict[str, object]:
    """JSON has no infinity: an error that is none is null, and the note says why."""
    return {
        "folder": check.folder,
        "pool": check.pool or None,
        "file": check.subject,
        "tensor": check.name,
        "max_error": check.max_error if math.isfinite(check.max_error) else None,
        "limit": str(check.tolerance),
        "share_of_limit": check.share if math.isfinite(check.share) else None,
        "ok": check.ok,
        "note": check.note,
    }


def _print_tables(report: Report) -> None:
    """Per folder and pool: each tensor's largest error over the prompts."""
    groups: dict[tuple[str, str], dict[str, list[Check]]] = {}
    for check in report.checks:
        tensors = groups.setdefault((check.folder, check.pool), {})
        tensors.setdefault(_RANDOM.sub("random", check.name), []).append(check)
    for (folder, pool), tensors in groups.items():
        print(f"{folder}, pool {pool}" if pool else folder)
        rows: list[tuple[str, ...]] = [("tensor", "limit", "checks", "max error", "of limit", "")]
        rows += [_summary(name, checks) for name, checks in sorted(tensors.items(), key=_order)]
        print(aligned(rows, left=2) + "\n")
    for check in report.failures[:MOST_FAILURES]:
        where = "/".join(part for part in (check.folder, check.pool, check.subject) if part)
        print(f"FAILED {where} {check.name}: {check.note or _excess(check)}")
    if len(report.failures) > MOST_FAILURES:
        print(f"and {len(report.failures) - MOST_FAILURES} more")
    verdict = f"{len(report.failures)} of" if report.failures else "all"
    print(f"{verdict} {len(report.checks)} checks {'FAILED' if report.failures else 'ok'}")


def _summary(name: str, checks: list[Check]) -> tuple[str, ...]:
    error, share = max(c.max_error for c in checks), max(c.share for c in checks)
    is_exact = checks[0].tolerance == EXACT
    return (
        name,
        str(checks[0].tolerance),
        str(len(checks)),
        _error(error, is_exact=is_exact),
        "" if is_exact else _share(share),
        "ok" if all(check.ok for check in checks) else "FAILED",
    )


def _excess(check: Check) -> str:
    """How a compared tensor is over its limit."""
    error = _error(check.max_error, is_exact=check.tolerance == EXACT)
    if check.tolerance == EXACT or not math.isfinite(check.max_error):
        return error
    if check.share < MOST_SHARE:
        return f"error {error}, {check.share:.3g} times its limit"
    return f"error {error}, limit {check.tolerance}"


def _error(error: float, *, is_exact: bool) -> str:
    if not math.isfinite(error):
        return "not comparable" if is_exact else "not finite"
    return f"{error:.0f} differ" if is_exact else f"{error:.2e}"


def _share(share: float) -> str:
    return f"{share:.1%}" if share < MOST_SHARE else f"> {MOST_SHARE:.0%}"


def _order(item: tuple[str, list[Check]]) -> tuple[object, ...]:
    """By name, layer numbers as numbers."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in item[0].split("."))
