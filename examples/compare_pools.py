"""The same prompts through both pools and every row format: the tokens, the bytes, the speed.

    python examples/compare_pools.py [CHECKPOINT_FOLDER] [--max-new-tokens N]

In deterministic mode a token's logits do not depend on the pool, to the last bit. They do not depend on bf16 or packed
fp8 either where the model itself rounds its KV to fp8 (kv_quant "official"): both hold those values exactly. Pools that
must agree but do not make the exit status 1. fp32 rows round nothing, so that their text may part from the others'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import attrs
import torch

import dsv4
from dsv4 import registry
from dsv4.errors import Dsv4Error, RequestError

PROMPTS = (
    "def read_file(path):\n    if not",
    "def get(self, name):\n    if not isinstance(",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n'
    "        self.items = []\n\n    def __len__(self):\n        return len(self.items)\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
    '        """',
)
MAX_CONTEXT = 1024
BURST = 4
"""Decode steps of one pool before it is the next one's turn."""
COMBINATIONS = [
    (pool, row_format) for row_format in ("fp32", "bf16", "fp8") for pool in registry.pool_names()
]

Tokens = tuple[tuple[int, ...], ...]


@attrs.frozen(kw_only=True)
class Result:
    """What one pool did with the prompts."""

    pool: str
    row_format: str
    tokens: Tokens
    """Generated token ids by prompt."""
    texts: tuple[str, ...]
    bytes_per_token: float
    bytes_per_slot: int
    tokens_per_second: float


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all pools that must agree do, 1 if not, 2 if the checkpoint cannot be used, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", default="tiny", help="folder (default: tiny)")
    parser.add_argument("--max-new-tokens", type=int, default=72, metavar="N")
    args = parser.parse_args(argv)
    # Operations this small only wait for other threads; on a busy machine two that spin are 10 to 50 times slower.
    torch.set_num_threads(1)
    try:
        return compare(args.checkpoint, args.max_new_tokens)
    except Dsv4Error as error:
        print(f"compare_pools: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_pools: interrupted", file=sys.stderr)
        return 130


def compare(checkpoint: str, max_new_tokens: int) -> int:
    """Print texts and table as they come, so that a pipe or log shows how far it is."""
    model = dsv4.load(checkpoint, backend=backend_config(*COMBINATIONS[0]))
    (first,) = run(model, COMBINATIONS[:1], max_new_tokens)
    print_texts(first)
    print(f"{len(COMBINATIONS)} pools take turns, {BURST} decode steps at a time:", flush=True)
    print_head()
    results = []
    for result in run(model, COMBINATIONS, max_new_tokens):
        print_row(result, first)
        results.append(result)
    print_foot()
    official = model.config.kv_quant == "official"
    agree = all(len({r.tokens for r in group}) == 1 for group in groups(results, official))
    print(verdict(results, agree))
    return 0 if agree else 1


def backend_config(pool: str, row_format: str) -> dsv4.BackendConfig:
    pool_config = registry.pool_config_class(pool)(
        max_requests=len(PROMPTS), max_context=MAX_CONTEXT, row_format=row_format
    )
    return dsv4.BackendConfig(pool=pool_config, deterministic=True)


def run(
    model: dsv4.Model, combinations: Sequence[tuple[str, str]], max_new_tokens: int
) -> Iterator[Result]:
    """Decode all prompts on a backend per combination; the weights are shared.

    The backends take turns: what else the machine does slows all of them alike.
    """
    decoders = [Decoder(model, pool, rows, max_new_tokens) for pool, rows in combinations]
    while decoders:
        for decoder in decoders:
            for _ in range(BURST):
                decoder.step()
        # In the order of the table: a later one that is done waits for those before it.
        while decoders and not decoders[0].engine.num_running:
            yield decoders.pop(0).result()


class Decoder:
    """All prompts as one ragged batch on a backend of its own."""

    def __init__(self, model: dsv4.Model, pool: str, row_format: str, max_new_tokens: int) -> None:
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise RequestError(
                "prompts are text, but the checkpoint has no tokenizer; name another"
            )
        self.pool, self.row_format = pool, row_format
        backend = dsv4.Backend.from_config(model.config, backend_config(pool, row_format))
        self.memory = type(backend.pool).estimate(backend.config.pool, model.config)
        self.engine = dsv4.Engine(attrs.evolve(model, backend=backend))
        self.handles = [
            self.engine.submit(
                dsv4.Request(
                    prompt_token_ids=tokenizer.encode(prompt), max_new_tokens=max_new_tokens
                )
            )
            for prompt in PROMPTS
        ]
        # The first step is the prefill of all prompts.
        self.engine.step()
        self.rates: list[float] = []

    def step(self) -> None:
        """The next token of every prompt; nothing once all are finished."""
        if self.engine.num_running:
            start = time.perf_counter()
            num_tokens = len(self.engine.step())
            self.rates.append(num_tokens / (time.perf_counter() - start))

    def result(self) -> Result:
        completions = [h.completion for h in self.handles if h.completion is not None]
        return Result(
            pool=self.pool,
            row_format=self.row_format,
            tokens=tuple(completion.token_ids for completion in completions),
            texts=tuple(completion.text for completion in completions),
            bytes_per_token=self.memory.bytes_per_token,
            bytes_per_slot=self.memory.bytes_per_slot,
            tokens_per_second=statistics.median(self.rates) if self.rates else 0.0,
        )


def groups(results: Sequence[Result], official: bool) -> list[list[Result]]:
    """Results whose tokens must be equal: both pools of a row format; with official rounding bf16 and fp8 too."""
    by_values: dict[str, list[Result]] = {}
    for result in results:
        rounded = official and result.row_format != "fp32"
        by_values.setdefault("rounded" if rounded else result.row_format, []).append(result)
    return list(by_values.values())


def verdict(results: Sequence[Result], agree: bool) -> str:
    """One line; where it is not simply yes, what differs."""
    if not agree:
        return "same tokens: NO, pools that must agree differ; see the table"
    if all(result.tokens == results[0].tokens for result in results):
        return f"same tokens: yes, all {len(results)}"
    return (
        "same tokens: yes, both pools of each row format (rounded rows may leave the text of fp32)"
    )


def print_texts(result: Result) -> None:
    for number, (prompt, text) in enumerate(zip(PROMPTS, result.texts, strict=True), start=1):
        print(f"--- prompt {number} of {len(PROMPTS)}, its continuation behind >>>")
        print(f"{prompt}>>>{whole_lines(text)}\n", flush=True)


def whole_lines(text: str) -> str:
    """Up to the last line end: the limit of tokens cuts anywhere."""
    return text.rpartition("\n")[0].rstrip() or text


def print_head() -> None:
    head = f"{'pool':<11} {'rows':<5} {'B/token':>8} {'B/slot':>8} {'tok/s':>7}  tokens"
    print(head, flush=True)


def print_row(result: Result, first: Result) -> None:
    print(
        f"{result.pool:<11} {result.row_format:<5} {result.bytes_per_token:>8,.1f} "
        f"{result.bytes_per_slot:>8,} {result.tokens_per_second:>7,.1f}  "
        f"{difference(result.tokens, first.tokens)}",
        flush=True,
    )


def print_foot() -> None:
    print(
        f"tok/s of the median decode step: {len(PROMPTS)} prompts in one batch, deterministic mode, CPU, "
        f"{torch.get_num_threads()} thread, torch {torch.__version__}"
    )


def difference(tokens: Tokens, wanted: Tokens) -> str:
    """`same`, or where the tokens part from those of the first row."""
    for number, (got, want) in enumerate(zip(tokens, wanted, strict=True), start=1):
        if got != want:
            pairs = zip(got, want, strict=False)
            common = min(len(got), len(want))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), common)
            return f"prompt {number} differs from token {at + 1} on"
    return "same"


if __name__ == "__main__":
    sys.exit(main())
