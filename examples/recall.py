"""Recall of a key through the real engine and both pools: the shipped checkpoint's proof that old entries are read.

    python examples/recall.py tiny --windows 4,16,64 --trials 200 --out recall.json

Each trial states a random key once, continues with code of the standard library, and asks. The control overwrites the
slot's compressed entries with zeros before it asks: a score that survives would not come from the entries.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tiny_training.data import KEY_LENGTH, KEY_PREFIX, Corpus, recall_prompt
from torch import Tensor

from dsv4.bench.record import record
from dsv4.config import BackendConfig, ModelConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.engine.engine import Engine
from dsv4.model.model import load, resolve
from dsv4.pool.base import KVPool, Region

POOLS = {"unified": UnifiedPoolConfig, "three-pool": ThreePoolConfig}


def zero_entries(pool: KVPool, slot: int) -> None:
    """Overwrite every compressed entry of a slot, in all layers."""
    pages = [page for page in pool.block_table[slot].tolist() if page >= 0]
    for component in pool.components():
        if component.layer is None or not component.name.endswith(f".{Region.ENTRIES.value}"):
            continue
        view = pool.view(component.layer, Region.ENTRIES)
        rows = [row for page in pages for row in component.rows_of_page(page)]
        zeros = torch.zeros(len(rows), view.format.row_dim, device=pool.device)
        view.write(torch.tensor(rows, dtype=torch.int32, device=pool.device), zeros)


def answer(engine: Engine, slot: int) -> bytes:
    """Ask, and decode the key greedily."""
    logits: Tensor = engine.prefill(slot, list(KEY_PREFIX))
    found = [int(logits[0].argmax())]
    while len(found) < KEY_LENGTH:
        found.append(int(engine.decode([slot], [found[-1]])[0].argmax()))
    return bytes(i for i in found if i < 256)


def trial(engine: Engine, prompt: list[int], key: bytes) -> tuple[bool, bool]:
    """-> (right with the entries, right with zeros in their place)."""
    pool, slot = engine.pool, engine.pool.acquire()
    engine.prefill(slot, prompt[: -len(KEY_PREFIX)])
    snapshot = pool.export(slot)
    right = answer(engine, slot) == key
    pool.release(slot)
    slot = pool.acquire()
    pool.reserve(slot, snapshot.length)
    pool.attach(slot, snapshot)
    pool.drop(snapshot)
    zero_entries(pool, slot)
    survived = answer(engine, slot) == key
    pool.release(slot)
    return right, survived


def measure(engine: Engine, text: np.ndarray, distance: int, trials: int) -> dict[str, float]:
    rng = np.random.default_rng([distance, 2024])  # not the trials that training watched
    results = [trial(engine, *recall_prompt(text, rng, distance)) for _ in range(trials)]
    right, survived = np.array(results).mean(0)
    return {"recall": float(right), "entries_zeroed": float(survived)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="folder, or tiny: the one in the package")
    parser.add_argument(
        "--windows",
        default="4,16,64",
        help="how far back the key is stated, in sliding windows (default: %(default)s)",
    )
    parser.add_argument(
        "--trials", type=int, default=200, help="keys per pool and distance (default: %(default)s)"
    )
    parser.add_argument(
        "--pool", choices=[*POOLS, "both"], default="both", help="default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--source", type=Path, help="folder of Python sources; default: the standard library"
    )
    parser.add_argument("--out", type=Path, help="write the record of this run here, as JSON")
    args = parser.parse_args()
    rows = []
    for pool in POOLS if args.pool == "both" else (args.pool,):
        distances = [int(windows) for windows in args.windows.split(",")]
        window = ModelConfig.from_json(resolve(args.checkpoint)).sliding_window
        config = POOLS[pool](max_requests=2, max_context=window * max(distances) + 256)
        model = load(args.checkpoint, backend=BackendConfig(pool=config), device=args.device)
        text = Corpus.standard_library(
            bos=model.config.bos_token_id or 0, eos=model.config.eos_token_id or 0, root=args.source
        ).held_out
        for windows in distances:
            distance = windows * window
            row = {"pool": pool, "windows": windows, "tokens": distance, "trials": args.trials}
            rows.append(row | measure(Engine(model), text, distance, args.trials))
            print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        document = record(rows, ["python", *sys.argv], args.device)
        args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
