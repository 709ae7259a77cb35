"""dsv4 generate: continue prompts with a checkpoint, several of them as one ragged batch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsv4 import registry
from dsv4.cli.arguments import (
    Commands,
    Parser,
    UsageError,
    add_command,
    add_compute,
    add_json,
    add_pool,
    add_row_format,
    add_threads,
    count,
    print_json,
    set_threads,
)
from dsv4.cli.timed_engine import TimedEngine
from dsv4.cli.units import format_bytes
from dsv4.config import BackendConfig, EngineConfig, ModelConfig
from dsv4.engine.request import Completion, Request
from dsv4.errors import RequestError
from dsv4.model.model import Model, load, resolve
from dsv4.tokenizer import Tokenizer, load_tokenizer


def add(commands: Commands) -> None:
    """Register the command."""
    parser = add_command(
        commands, "generate", run, "continue prompts; several are decoded as one ragged batch"
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="checkpoint folder, or the word tiny for the shipped checkpoint",
    )
    _add_prompts(parser)
    add_pool(parser)
    add_row_format(parser)
    add_compute(parser, dtype="auto")
    add_threads(parser)
    _add_sampling(parser)
    _add_capacity(parser)
    add_json(
        parser,
        "; tokens_per_second is all generated tokens over all seconds, prefill included, "
        "decode_tokens_per_second leaves the prefill out",
    )


def _add_prompts(parser: Parser) -> None:
    group = parser.add_argument_group("prompts (each may be given several times)")
    add = group.add_argument
    # One list for the three of them, so that completions come in the order of the command line.
    shared: dict[str, Any] = {"action": "append", "dest": "prompts"}
    add("--prompt", metavar="TEXT", type=lambda text: text, **shared)
    add("--prompt-file", metavar="FILE", type=Path, help="a prompt as UTF-8 text", **shared)
    ids = "a prompt as token ids, for checkpoints without a tokenizer too"
    add("--prompt-ids", metavar="1,2,3", type=_token_ids, help=ids, **shared)


def _add_sampling(parser: Parser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    defaults = {field.name: field.default for field in attrs.fields(Request)}
    add(
        "--max-new-tokens",
        type=int,
        default=defaults["max_new_tokens"],
        metavar="N",
        help="tokens to generate per prompt (default: %(default)s)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (the default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="mass to sample from (default: 1)")
    add("--seed", type=int, default=None, metavar="S", help="equal seeds give equal samples")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )


def _add_capacity(parser: Parser) -> None:
    add = parser.add_argument_group("capacity").add_argument
    add(
        "--max-context",
        type=count,
        metavar="N",
        help="tokens a request may reach, e.g. 64K (default: what the prompts need)",
    )
    add(
        "--max-requests",
        type=count,
        metavar="N",
        help="slots; more prompts than that wait (default: one per prompt)",
    )
    add("--chunk-tokens", type=count, metavar="N", help="prompt tokens per forward")
    add(
        "--draft",
        type=int,
        default=0,
        metavar="D",
        help="drafted tokens per step (not implemented yet; only 0)",
    )
    add(
        "--graphs",
        choices=("on", "off"),
        default="off",
        help="replay captured device graphs (not implemented yet; only off)",
    )
    add(
        "--prefix-cache",
        choices=("on", "off"),
        default="off",
        help="reuse shared prompt prefixes (not implemented yet; only off)",
    )


def run(args: argparse.Namespace) -> int:
    """Load, generate, print."""
    _refuse_missing_features(args)
    if not args.prompts:
        raise UsageError("no prompt: give --prompt, --prompt-file or --prompt-ids")
    folder = resolve(args.checkpoint)
    config = ModelConfig.from_json(folder / "config.json")
    set_threads(args, config.hidden_size)
    requests = _requests(args, load_tokenizer(folder, config))
    backend = _backend(args, requests, config.max_position_embeddings)
    model = load(args.checkpoint, backend=backend, device=args.device, dtype=args.dtype)
    chunk_tokens = args.chunk_tokens and min(args.chunk_tokens, backend.max_batch_tokens)
    engine = TimedEngine(model, EngineConfig(backend=backend, chunk_tokens=chunk_tokens))
    for request in requests:
        engine.check(request)
    result = _generate(engine, requests, args)
    if args.json:
        print_json(_document(args, engine, model, result))
    else:
        sys.stdout.flush()
        # The text alone goes into a file or a pipe.
        shown = sys.stdout if sys.stdout.isatty() else sys.stderr
        print(_last_line(args, engine, model, result), file=shown)
    return 0


def _refuse_missing_features(args: argparse.Namespace) -> None:
    wanted = {
        f"--draft {args.draft}": (args.draft != 0, "speculative decoding is", "0"),
        "--graphs on": (args.graphs == "on", "device graphs are", "off"),
        "--prefix-cache on": (args.prefix_cache == "on", "a prefix cache is", "off"),
    }
    for option, (asked, what, remedy) in wanted.items():
        if asked:
            raise UsageError(f"{option}: {what} not implemented; leave it {remedy}")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of token ids; give numbers with commas between them"
        ) from None


def _requests(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[Request]:
    """All prompts as token ids, with their options checked, before any weight is read."""
    return [
        Request(
            prompt_token_ids=_encode(prompt, tokenizer, args.checkpoint),
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            stop=args.stop,
        )
        for prompt in args.prompts
    ]


def _encode(
    prompt: str | Path | list[int], tokenizer: Tokenizer | None, checkpoint: str
) -> Sequence[int]:
    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise RequestError(
            f"prompt is text, but checkpoint {checkpoint} has no tokenizer; use --prompt-ids"
        )
    return tokenizer.encode(_read(prompt) if isinstance(prompt, Path) else prompt)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt file {path}: byte {error.start} is no UTF-8; convert the file to UTF-8"
        ) from None


def _backend(
    args: argparse.Namespace, requests: Sequence[Request], max_positions: int
) -> BackendConfig:
    """A pool that holds exactly these requests, unless the options size it."""
    pool_type = registry.pool_config_class(args.pool)
    needed = max(request.total_tokens for request in requests)
    backend = BackendConfig(
        pool=pool_type(
            max_requests=args.max_requests or len(requests),
            max_context=args.max_context or min(needed, max_positions),
            row_format=args.row_format,
        ),
        kernels=args.kernels,
        deterministic=args.deterministic,
    )
    # A chunk is never longer than the longest prompt, whatever was asked for.
    most = max(backend.max_batch_tokens, min(args.chunk_tokens or 0, needed))
    return attrs.evolve(backend, max_batch_tokens=most)


@frozen
class _Result:
    completions: list[Completion]
    seconds: float

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(completion.prompt_token_ids) for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


def _generate(
    engine: TimedEngine, requests: Sequence[Request], args: argparse.Namespace
) -> _Result:
    """Run all requests; text of a single one appears as it comes, of several one after another."""
    streaming = len(requests) == 1 and not args.json
    done: dict[int, Completion] = {}
    start = time.perf_counter()
    prompts = [request.prompt_token_ids for request in requests]
    deltas = engine.stream(
        prompts,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )
    with closing(deltas):
        for index, delta in deltas:
            if streaming:
                print(delta.text, end="", flush=True)
            if delta.completion is not None:
                if delta.completion.error is not None:
                    raise delta.completion.error
                done[index] = delta.completion
    seconds = time.perf_counter() - start
    completions = [done[index] for index in range(len(requests))]
    if not args.json:
        _print_completions(completions, streaming, has_text=engine.model.tokenizer is not None)
    return _Result(completions, seconds)


def _print_completions(
    completions: Sequence[Completion], streaming: bool, *, has_text: bool
) -> None:
    if streaming and has_text:
        print()
        return
    for index, completion in enumerate(completions):
        body = completion.text if has_text else ",".join(map(str, completion.token_ids))
        print(body if streaming else f"--- prompt {index + 1} of {len(completions)}\n{body}")


def _kv_bytes(model: Model) -> int:
    config = model.backend.config.pool
    return registry.pool_class(config).estimate(config, model.config).total


def _last_line(args: argparse.Namespace, engine: TimedEngine, model: Model, result: _Result) -> str:
    speed = engine.decode_tokens_per_second
    seconds = engine.prefill_seconds
    parts = [
        f"prefill {_tokens(result.num_prompt_tokens)} in "
        + (f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.2g} s"),
        *([] if speed is None else [f"decode {speed:,.1f} tok/s"]),
        f"KV {format_bytes(_kv_bytes(model))}",
        f"pool {args.pool}",
    ]
    return f"[{_tokens(result.num_tokens)}: {', '.join(parts)}]"


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def _document(
    args: argparse.Namespace, engine: TimedEngine, model: Model, result: _Result
) -> dict[str, object]:
    backend, decode_speed = model.backend, engine.decode_tokens_per_second
    return {
        "pool": args.pool,
        "kernels": backend.kernels.name,
        "completions": [
            {
                "prompt_tokens": len(completion.prompt_token_ids),
                "token_ids": list(completion.token_ids),
                "text": completion.text,
            }
            for completion in result.completions
        ],
        "tokens_per_second": round(result.tokens_per_second, 2),
        "decode_tokens_per_second": None if decode_speed is None else round(decode_speed, 2),
        "prefill_tokens": result.num_prompt_tokens,
        "prefill_seconds": round(engine.prefill_seconds, 4),
        "kv_bytes": _kv_bytes(model),
        "finish_reasons": [str(completion.finish_reason) for completion in result.completions],
        "seconds": round(result.seconds, 4),
        "row_format": backend.config.pool.row_format,
        "max_requests": backend.config.pool.max_requests,
        "max_context": backend.config.pool.max_context,
        "device": args.device,
        "deterministic": args.deterministic,
    }
