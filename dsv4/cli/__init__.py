"""The command line `dsv4`: one module per command, each with `add` (its arguments) and `run` (its work).

Every error of this library is one line on stderr and exit status 2. The commands, and torch with them, are imported
by `main` and not with this module: importing takes seconds, and an interruption there is one line too.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv4.errors import Dsv4Error

if TYPE_CHECKING:
    from dsv4.cli.arguments import Parser

FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell reports for a program that a closed pipe ended."""


def build_parser() -> Parser:
    """The parser of all commands; a parsed namespace has `run`."""
    import dsv4
    from dsv4.cli import bench, generate, info, map, plan, verify
    from dsv4.cli.arguments import Parser

    parser = Parser(
        prog="dsv4",
        description="DeepSeek-V4 decoding with pluggable KV memory pools.",
        epilog="`dsv4 COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"dsv4 {dsv4.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for command in (generate, verify, plan, bench, info, map):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 if a verification failed, 2 for errors, 130 if interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        parser = build_parser()
        if not words:
            parser.print_help(sys.stderr)
            return FAILED
        args = parser.parse_args(words)
        args.command_line = ["dsv4", *words]
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except Dsv4Error as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("dsv4: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left; the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        return _fail(f"{error.filename or 'system'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not _is_memory_error(error):
            raise
        return _fail(f"out of memory ({_first_line(error)}); lower max_requests or max_context")


def _fail(message: str) -> int:
    print(f"dsv4: error: {' '.join(message.split())}", file=sys.stderr)
    return FAILED


def _is_memory_error(error: BaseException) -> bool:
    import torch

    # torch has no exception class for a failed allocation on the CPU.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
