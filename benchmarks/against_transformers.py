"""Decode and prefill beside Hugging Face transformers: one process, one model, the same threads.

    python benchmarks/against_transformers.py --out benchmarks/results/against_transformers.json

Both sides run the config and weights of golden/tiny in fp32 on the CPU. Measurements alternate between the two, so
that what else the machine does meets both alike; each row is the median of several. transformers decodes a ragged
batch one prompt after another: with left padding its compressed entries are wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from attrs import frozen
from safetensors.torch import load_file

import dsv4
from dsv4.bench.record import record
from dsv4.config import ModelConfig
from dsv4.engine.engine import Engine
from dsv4.model.checkpoint import load_weights
from dsv4.model.decoder import Decoder
from dsv4.model.model import Model

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "data" / "golden" / "tiny"
WARMUP_STEPS = 2
RAGGED = (1.0, 0.25, 0.5, 0.75, 0.1, 0.9, 0.4, 0.6)
"""Lengths of the prompts of the ragged batch, as fractions of the longest."""


@frozen(kw_only=True)
class Sizes:
    """What is measured."""

    prompt_tokens: int
    steps: int
    repeats: int

    @property
    def ragged(self) -> list[int]:
        return [max(1, round(self.prompt_tokens * part)) for part in RAGGED]

    @property
    def max_context(self) -> int:
        return self.prompt_tokens + WARMUP_STEPS + self.steps * self.repeats


class OurSide:
    """This library's engine, with explicit slots."""

    def __init__(self, sizes: Sizes, pool: str) -> None:
        config = ModelConfig.from_json(GOLDEN / "config.json")
        decoder = Decoder(config)
        load_weights(decoder, GOLDEN / "weights.safetensors")
        pool_type = {"unified": dsv4.UnifiedPoolConfig, "three-pool": dsv4.ThreePoolConfig}[pool]
        pool_config = pool_type(max_requests=len(RAGGED), max_context=sizes.max_context)
        backend = dsv4.Backend.create(config, pool_config)
        self.engine = Engine(Model(config=config, decoder=decoder, backend=backend))
        self._slots: list[int] = []

    def prefill(self, ids: Sequence[int]) -> None:
        slot = self.engine.pool.acquire()
        self.engine.prefill(slot, ids)
        self.engine.pool.release(slot)

    def decoder(self, prompts: Sequence[Sequence[int]]) -> Callable[[int], None]:
        """Prefills the prompts; the result runs so many steps of all of them."""
        slots = self._slots = [self.engine.pool.acquire() for _ in prompts]
        logits = [self.engine.prefill(s, p) for s, p in zip(slots, prompts, strict=True)]
        state = {"next": [int(row[-1].argmax()) for row in logits]}

        def run(steps: int) -> None:
            for _ in range(steps):
                state["next"] = self.engine.decode(slots, state["next"]).argmax(-1).tolist()

        return run

    def release(self) -> None:
        """Free the slots of the latest decoder."""
        while self._slots:
            self.engine.pool.release(self._slots.pop())


class TheirSide:
    """transformers with its own cache, one sequence per call."""

    def __init__(self) -> None:
        from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

        document = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))
        document.pop("kv_quant")  # this library's own key
        config = DeepseekV4Config(**document)
        config._attn_implementation = "eager"
        self.model = cast(Any, DeepseekV4ForCausalLM(config))
        self.model.eval()
        self.model.load_state_dict(load_file(GOLDEN / "weights.safetensors"))

    def prefill(self, ids: Sequence[int]) -> Any:
        return self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    def decoder(self, prompts: Sequence[Sequence[int]]) -> Callable[[int], None]:
        sequences = [_Sequence(self.model, self.prefill(ids)) for ids in prompts]

        def run(steps: int) -> None:
            for sequence in sequences:
                for _ in range(steps):
                    sequence.step()

        return run


class _Sequence:
    """One sequence of transformers and its cache."""

    def __init__(self, model: Any, output: Any) -> None:
        self._model, self._output = model, output

    def step(self) -> None:
        next_id = self._output.logits[:, -1:].argmax(-1)
        cache = self._output.past_key_values
        self._output = self._model(next_id, past_key_values=cache, use_cache=True)


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    args = _arguments(words)
    torch.set_num_threads(args.threads)
    sizes = Sizes(prompt_tokens=args.prompt_tokens, steps=args.steps, repeats=args.repeats)
    with torch.inference_mode():
        rows = list(_rows(sizes, OurSide(sizes, args.pool), TheirSide()))
    command = ["python", "benchmarks/against_transformers.py", *words]
    document = record(rows, command) | {"pool": args.pool}
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(document, indent=2))
        return
    for row in rows:
        print(
            f"{row['what']:8} batch {row['batch']}: {row['tokens_per_second']:,.1f} tok/s, transformers "
            f"{row['transformers_tokens_per_second']:,.1f} tok/s, ratio {row['ratio']}"
        )


def _rows(sizes: Sizes, ours: OurSide, theirs: TheirSide) -> Iterator[dict[str, object]]:
    chance = torch.Generator().manual_seed(0)
    vocab_size = ours.engine.model.config.vocab_size
    prompts = [
        torch.randint(vocab_size, (length,), generator=chance).tolist() for length in sizes.ragged
    ]
    for what, chosen in (("decode", prompts[:1]), ("decode", prompts)):
        runs = [ours.decoder(chosen), theirs.decoder(chosen)]
        for run in runs:
            run(WARMUP_STEPS)
        steps = [lambda run=run: run(sizes.steps) for run in runs]
        yield _row(what, chosen, len(chosen) * sizes.steps, _alternate(steps, sizes.repeats))
        ours.release()
    whole = [lambda: ours.prefill(prompts[0]), lambda: theirs.prefill(prompts[0])]
    yield _row("prefill", prompts[:1], len(prompts[0]), _alternate(whole, sizes.repeats))


def _alternate(works: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each work, measured in turn."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, found in zip(works, seconds, strict=True):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return seconds


def _row(
    what: str, prompts: Sequence[Sequence[int]], num_tokens: int, seconds: list[list[float]]
) -> dict[str, object]:
    ours, theirs = (statistics.median(found) for found in seconds)
    return {
        "what": what,
        "batch": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "tokens_per_second": round(num_tokens / ours, 2),
        "transformers_tokens_per_second": round(num_tokens / theirs, 2),
        "ratio": round(theirs / ours, 3),
        "seconds": [round(value, 6) for value in seconds[0]],
        "transformers_seconds": [round(value, 6) for value in seconds[1]],
    }


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=512, metavar="N", help="longest prompt (512)")
    add("--steps", type=int, default=32, metavar="N", help="decode steps per measurement (32)")
    add("--repeats", type=int, default=5, metavar="N", help="measurements per row (5)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of torch")
    add("--pool", choices=("unified", "three-pool"), default="unified")
    add("--json", action="store_true", help="print the whole record")
    add("--out", type=Path, metavar="FILE.json", help="write the record there")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
