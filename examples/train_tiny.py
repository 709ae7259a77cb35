"""Train the shipped tiny checkpoint: byte-level Python code, and a key to remember far outside the window.

    python examples/train_tiny.py --out tiny-checkpoint --minutes 9.4      # one H200
    python examples/train_tiny.py --out /tmp/micro --micro --device cpu    # seconds, to see that everything runs

Writes a checkpoint folder in the published format after each phase (`short`, `long`, and `sparse`, the one to ship)
and log.jsonl on the way. Step counts follow the clock, so two runs differ; `--steps` fixes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from attrs import evolve, frozen
from tiny_training.data import Corpus, Planter, batches
from tiny_training.evaluate import bits_per_byte, completion, recall
from tiny_training.loss import METRICS
from tiny_training.regions import Regions
from tiny_training.trainer import Phase, Trainer
from tiny_training.weights import initialise
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.checkpoint import save_checkpoint
from dsv4.model.decoder import Decoder

START = time.monotonic()
PROMPT = b'''"""Small helpers for reading text files."""

import os


def read_lines(path):
    """Return the lines of the file at path."""
'''


@frozen(kw_only=True)
class Plan:
    config: ModelConfig
    phases: tuple[Phase, ...]
    distances: tuple[int, ...]
    """Of the recall trials, in tokens."""
    trials: int
    reserve: float
    """Seconds kept for the last evaluation."""
    num_steps: tuple[int, ...] | None = None
    """Of each phase; None = as many as the time allows."""


def full_plan() -> Plan:
    """Sequences of 1 K first, where the task is learned fast; then 4 K, first dense, then with the indexer's selection.
    Every phase has 34,816 tokens a step, so that compiled code for single tokens is shared."""
    short = Phase(
        name="short", num_sequences=32, num_tokens=1088, sparse=False, rounded=False,
        share=0.45, recall=0.6, max_asks=2,
    )  # fmt: skip
    long = evolve(
        short,
        name="long",
        num_sequences=8,
        num_tokens=4352,
        rounded=True,
        share=0.15,
        recall=0.75,
        max_asks=6,
    )
    sparse = evolve(long, name="sparse", sparse=True, share=0.4)
    config = ModelConfig.preset("tiny")
    window = config.sliding_window
    return Plan(
        config=config, phases=(short, long, sparse), distances=tuple(window * n for n in (4, 16, 64)),
        trials=200, reserve=35.0,
    )  # fmt: skip


def micro_plan() -> Plan:
    """The same phases on a model and on sequences that a laptop trains in seconds."""
    document = ModelConfig.preset("tiny").to_json() | {
        "hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 32, "o_lora_rank": 16,
        "sliding_window": 16, "moe_intermediate_size": 32, "index_topk": 4,
        "compress_ratios": [0, 4, 8, 4, 8, 0],
    }  # fmt: skip
    phases = tuple(
        evolve(phase, num_sequences=2, num_tokens=tokens)
        for phase, tokens in zip(full_plan().phases, (256, 320, 320), strict=True)
    )
    return Plan(
        config=ModelConfig.from_json(document),
        phases=phases,
        distances=(64,),
        trials=4,
        reserve=0.0,
        num_steps=(2, 2, 2),
    )


class Log:
    """One JSON object per line, on the screen and in a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, **values: object) -> None:
        line = json.dumps({"seconds": round(time.monotonic() - START, 1)} | values)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()

    def step(self, num_steps: int, metrics: Tensor) -> None:
        named = zip((*METRICS, "gradient"), metrics.tolist(), strict=True)
        self.write(step=num_steps, **{name: round(value, 4) for name, value in named})


def evaluate(
    model: Decoder, plan: Plan, corpus: Corpus, phase: Phase, trials: int
) -> dict[str, float]:
    """Held-out bits per byte, and recall with its control."""
    tokens = phase.num_tokens
    main, draft = bits_per_byte(
        model, corpus.held_out, num_tokens=tokens, num_sequences=16, sparse=phase.sparse
    )
    found = {"bits_per_byte": round(main, 4), "draft_bits_per_byte": round(draft, 4)}
    for distance in plan.distances:
        if distance + 100 > tokens:
            continue
        for control in (False, True):
            name = f"recall_{distance}" + ("_entries_zeroed" if control else "")
            found[name] = recall(
                model, corpus.held_out, distance=distance, trials=trials, seed=distance,
                sparse=phase.sparse, zero_entries=control,
            )  # fmt: skip
    return found


def train(plan: Plan, corpus: Corpus, log: Log, args: argparse.Namespace) -> Decoder:
    torch.manual_seed(args.seed)
    model = Decoder(plan.config)
    initialise(model, args.seed)
    model.to(args.device)
    regions = Regions.compiled() if args.compile else Regions()
    trainer = Trainer(model, peak_rate=args.rate, regions=regions, graph=args.graph)
    until = START + 60 * args.minutes - plan.reserve
    begin, done = time.monotonic(), 0.0
    for i, phase in enumerate(plan.phases):
        planter = Planter(
            corpus.train, num_tokens=phase.num_tokens, recall=phase.recall, max_asks=phase.max_asks,
            nearest=plan.config.sliding_window + 24,
        )  # fmt: skip
        data = batches(planter, num_sequences=phase.num_sequences, seed=args.seed * 1000 + i)
        end = begin + (until - begin) * (done + phase.share)
        steps = plan.num_steps[i] if plan.num_steps else None
        trainer.run(
            phase, data, until=end, done=done, report=log.step, num_steps=steps,
            profile=args.out if args.profile else None,
        )  # fmt: skip
        done += phase.share
        data.close()
        save_checkpoint(model, plan.config, args.out / phase.name)
        last = i == len(plan.phases) - 1
        found = evaluate(model, plan, corpus, phase, plan.trials if last else min(plan.trials, 40))
        log.write(phase=phase.name, **found)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the checkpoint and the log"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="wall-clock budget, from after the imports"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--source", type=Path, help="folder of Python sources; default: the standard library"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="eager elementwise parts"
    )
    parser.add_argument(
        "--steps", help="steps of each phase, as 900,100,200, in place of the time budget"
    )
    parser.add_argument("--trials", type=int, help="recall trials per distance at the end")
    parser.add_argument(
        "--no-graph", dest="graph", action="store_false", help="launch kernels one by one"
    )
    parser.add_argument(
        "--profile", action="store_true", help="write a table of each phase's kernels"
    )
    parser.add_argument("--micro", action="store_true", help="a few steps of a model of toy size")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    plan = micro_plan() if args.micro else full_plan()
    if args.micro:
        torch.set_num_threads(1)  # tensors this small only wait for other threads
    if args.steps:
        plan = evolve(plan, num_steps=tuple(int(steps) for steps in args.steps.split(",")))
    if args.trials:
        plan = evolve(plan, trials=args.trials)
    if any((args.out / phase.name).exists() for phase in plan.phases):
        parser.error(f"--out {args.out}: holds a checkpoint; choose another folder")
    config = plan.config
    corpus = Corpus.standard_library(
        bos=config.bos_token_id or 0, eos=config.eos_token_id or 0, root=args.source
    )
    log = Log(args.out / "log.jsonl")
    log.write(
        torch=torch.__version__, device=str(args.device), seed=args.seed,
        train_bytes=len(corpus.train), held_out_bytes=len(corpus.held_out),
    )  # fmt: skip
    model = train(plan, corpus, log, args)
    text = completion(model, PROMPT, 16 if args.micro else 160)
    log.write(completion=text.decode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
