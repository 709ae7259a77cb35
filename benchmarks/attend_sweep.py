"""Times tile shapes of the Triton attend kernel on a GPU; tunes `dsv4.kernels.attend_plan_triton`.

    PYTHONPATH=. python benchmarks/attend_sweep.py --out attend_sweep.json

A table of 4,000,000 rows; the rows of a call are random and no other call's. Every configuration is checked against
float64 on the rows that it reads, in outputs of NaN, and then captured several times in one CUDA graph, each call
with its own queries, indices, output and rows. 2 GB are read before each replay to empty the L2; the median of the
replays is divided by the calls.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import triton
from attrs import asdict, evolve, frozen
from torch import Tensor

from dsv4.kernels.attend_plan_triton import FEW, NARROW, WIDE, Launch, Plan, Tile, plan
from dsv4.kernels.attend_triton import TritonAttention
from dsv4.metadata.buffers import SPLIT_PROGRAMS
from dsv4.metadata.plans import IndexStream, RopeTable, Source, Workspace
from dsv4.pool.base import KVView
from dsv4.pool.formats import PackedFp8Rows, PlainRows, RowFormat

TABLE_ROWS = 4_000_000
CONTEXT_ROWS = 32_768
"""Entries of one request at 128 K tokens: what a prefill selects from."""
HEAD_DIM, ROPE_DIM = 512, 64
REPLAYS = 15
FLUSH_NBYTES = 2 << 30
CHECKED_TOKENS = 12
MAX_ERROR = 4e-3
"""Relative, of bf16 results: rounding gives 2e-3."""
PACKED_VALUES = 1 << 27
"""Values packed at a time."""


@frozen
class Shape:
    """Tokens that read `window` and `entries` rows each."""

    name: str
    heads: int
    window: int
    entries: int
    tokens: int
    target_us: float
    row_format: str = "bf16"
    prefill: bool = False
    """Windows are contiguous and all entries one request's."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.row_format} {self.tokens}"


@frozen
class Config:
    """A way to run: parts None = as planned."""

    name: str
    tile: Tile | None = None
    parts: int | None = None
    rope: bool = False


PLANNED = Config("planned")
MANY = (
    PLANNED,
    Config("eager", evolve(WIDE, spread=False), 1),
    Config("spread", evolve(WIDE, eager=False), 1),
    Config("neither", evolve(WIDE, eager=False, spread=False), 1),
    Config("32 rows, 4 stages", evolve(WIDE, rows=32, num_stages=4), 1),
    Config("planned, rope", rope=True),
)
MANY_PACKED = (*MANY, Config("3 stages", evolve(WIDE, num_stages=3), 1))
"""Packed rows leave room for a third tile."""
FEW_TOKENS = (
    PLANNED,
    Config("narrow", NARROW, 0),
    Config("narrow, 8 warps", evolve(NARROW, num_warps=8), 0),
    Config("narrow 16 rows", evolve(NARROW, rows=16), 0),
    Config("narrow 64 rows", evolve(NARROW, rows=64, num_warps=8), 0),
    Config("few, whole", FEW, 1),
    Config("few, 2 tiles a part", FEW, -2),
    Config("few, 4 tiles a part", FEW, -4),
    Config("few, waiting, 2 tiles a part", evolve(FEW, eager=False), -2),
    Config("few, 3 stages, 2 tiles a part", evolve(FEW, num_stages=3), -2),
    Config("wide, whole", WIDE, 1),
    Config("wide, a tile a part", WIDE, 0),
    Config("wide 32 rows, a tile a part", evolve(WIDE, rows=32), 0),
    Config("wide, 2 tiles a part", WIDE, -2),
    Config("wide, 3 tiles a part", WIDE, -3),
)
"""Parts 0: one tile each; -n: n tiles each."""
SHAPES: tuple[tuple[Shape, tuple[Config, ...]], ...] = (
    (Shape("flash-csa", 64, 128, 512, 1, 8.5), FEW_TOKENS),
    (Shape("flash-hca128k", 64, 128, 1024, 1, 10.0), FEW_TOKENS),
    (Shape("flash-csa", 64, 128, 512, 8, 17.0), FEW_TOKENS),
    (Shape("flash-csa", 64, 128, 512, 32, 22.3), FEW_TOKENS),
    (Shape("pro-csa", 128, 128, 1024, 1, 14.8), FEW_TOKENS),
    (Shape("flash-hca8k", 64, 128, 64, 8, 11.3), FEW_TOKENS),
    (Shape("flash-hca8k", 64, 128, 64, 32, 12.2), FEW_TOKENS),
    (Shape("flash-hca8k", 64, 128, 64, 64, 13.9), (PLANNED, Config("wide, whole", WIDE, 1))),
    (Shape("flash-csa", 64, 128, 512, 64, 24.9), (PLANNED, Config("wide, whole", WIDE, 1))),
    (Shape("flash-csa", 64, 128, 512, 128, 48.0), MANY),
    (Shape("flash-csa", 64, 128, 512, 512, 172.0), MANY),
    (Shape("pro-csa", 128, 128, 1024, 128, 141.0), MANY),
    (Shape("pro-csa", 128, 128, 1024, 512, 540.0), MANY),
    (Shape("flash-context", 64, 128, 512, 4096, 1210.0, prefill=True), MANY),
    (Shape("pro-context", 128, 128, 1024, 4096, 4100.0, prefill=True), MANY),
    (Shape("flash-csa", 64, 128, 512, 1, 13.4, "fp8"), FEW_TOKENS),
    (Shape("flash-csa", 64, 128, 512, 128, 47.4, "fp8"), MANY_PACKED),
    (Shape("flash-csa", 64, 128, 512, 256, 90.3, "fp8"), MANY_PACKED),
    (Shape("flash-csa", 64, 128, 512, 512, 175.0, "fp8"), MANY_PACKED),
    (Shape("pro-csa", 128, 128, 1024, 512, 402.3, "fp8"), MANY_PACKED),
)


class Fixed(TritonAttention):
    """Runs one configuration, planned as for `num_tokens`."""

    def __init__(self, config: Config, num_tokens: int) -> None:
        super().__init__()
        self._config = config
        self._num_tokens = num_tokens

    def _plan(self, q_THD: Tensor, launches: Sequence[Launch], scratch: Tensor | None) -> Plan:
        tile, parts = self._config.tile, self._config.parts
        if tile is None or parts is None:
            return plan(q_THD[:1].expand(self._num_tokens, -1, -1), launches, scratch)
        if parts < 1:
            tiles = launches[0].num_tiles(tile.rows)
            parts = -(-tiles // max(1, -parts))
        return Plan(tile, exact=False, parts=parts)


@frozen(eq=False)
class Call:
    """Inputs and output of one call."""

    q_THD: Tensor
    sources: tuple[Source, Source]
    out_THD: Tensor

    def run(
        self, kernel: TritonAttention, sink_H: Tensor, rope: RopeTable | None, space: Workspace
    ) -> None:
        kernel.attend(
            self.q_THD,
            self.sources,
            sink_H,
            scale=HEAD_DIM**-0.5,
            out_THD=self.out_THD,
            rope=rope,
            workspace=space,
        )


def row_format(name: str) -> RowFormat:
    if name == "fp8":
        return PackedFp8Rows(HEAD_DIM, ROPE_DIM)
    return PlainRows(torch.bfloat16, HEAD_DIM)


def make_table(name: str, num_rows: int, device: torch.device) -> KVView:
    """A table of random rows."""
    form = row_format(name)
    storage = torch.empty(form.storage_shape(num_rows), dtype=form.storage_dtype, device=device)
    view = KVView(storage, num_rows, form)
    step = PACKED_VALUES // HEAD_DIM
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        values_KD = torch.randn(last - first, HEAD_DIM, dtype=torch.bfloat16, device=device)
        if name == "bf16":
            storage[first:last] = values_KD
        else:
            rows_K = torch.arange(first, last, device=device)
            form.import_rows(storage, rows_K, form.encode(values_KD))
    return view


def stream(rows_TK: Tensor) -> IndexStream:
    """All tokens read as many rows."""
    num_tokens, width = rows_TK.shape
    ends = torch.arange(
        0, (num_tokens + 1) * width, width, dtype=torch.int32, device=rows_TK.device
    )
    return IndexStream(ends, rows_TK.int().flatten().contiguous(), width)


def make_calls(shape: Shape, view: KVView, count: int) -> Iterator[Call]:
    """Calls of disjoint rows."""
    device, tokens = view.storage.device, shape.tokens
    own = tokens * (shape.window + shape.entries)
    free = torch.randperm(view.num_rows, device=device)
    for i in range(count):
        if shape.prefill:
            first = i * (tokens + CONTEXT_ROWS + shape.window)
            window_TK = first + torch.arange(tokens, device=device)[:, None]
            window_TK = window_TK + torch.arange(shape.window, device=device)
            picks = torch.rand(tokens, CONTEXT_ROWS, device=device).topk(shape.entries).indices
            entries_TK = first + tokens + shape.window + picks.sort().values
        else:
            rows = free[i * own : (i + 1) * own].view(tokens, -1)
            window_TK, entries_TK = rows[:, : shape.window], rows[:, shape.window :]
        q_THD = torch.randn(tokens, shape.heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        sources = Source(view, stream(window_TK)), Source(view, stream(entries_TK))
        yield Call(q_THD, sources, torch.empty_like(q_THD))


def error_of(call: Call, sink_H: Tensor, rope: RopeTable | None) -> float:
    """Relative error of some tokens against float64; infinite if any output of any token is not finite."""
    if not bool(torch.isfinite(call.out_THD).all()):
        return float("inf")
    tokens = call.q_THD.shape[0]
    picked = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS)).long().to(sink_H.device)
    rows_TK = torch.cat(
        [s.stream.indices_N.view(tokens, -1)[picked] for s in call.sources], 1
    ).long()
    values_TKD = call.sources[0].view.read(rows_TK).double()
    q_THD = call.q_THD[picked].double()
    scores_THK = torch.einsum("thd,tkd->thk", q_THD, values_TKD) * HEAD_DIM**-0.5
    sinks_TH1 = sink_H.double()[None, :, None].expand(len(picked), -1, 1)
    weights_THK = torch.cat([scores_THK, sinks_TH1], -1).softmax(-1)[..., :-1]
    wanted_THD = torch.einsum("thk,tkd->thd", weights_THK, values_TKD)
    if rope is not None:
        cos, sin = rope.cos_TP[picked, None].double(), rope.sin_TP[picked, None].double()
        a, b = wanted_THD[..., -ROPE_DIM::2].clone(), wanted_THD[..., -ROPE_DIM + 1 :: 2].clone()
        wanted_THD[..., -ROPE_DIM::2] = a * cos + b * sin
        wanted_THD[..., -ROPE_DIM + 1 :: 2] = b * cos - a * sin
    error = (call.out_THD[picked].double() - wanted_THD).norm() / wanted_THD.norm()
    return float(error)


class Bench:
    """A table, and what all shapes share. Without `timed` it only checks."""

    def __init__(
        self, row_format: str, num_rows: int, device: torch.device, *, timed: bool
    ) -> None:
        self.device = device
        self.view = make_table(row_format, num_rows, device)
        self.flush = torch.zeros(FLUSH_NBYTES // 4, device=device) if timed else None
        angles_TP = torch.rand(4096, ROPE_DIM // 2, device=device) * 6.28
        self.rope = RopeTable(angles_TP.cos(), angles_TP.sin())
        partials = torch.empty(SPLIT_PROGRAMS * 64 * (HEAD_DIM + 2), device=device)
        empty = torch.empty(0, device=device)
        # The fields beside partials are other ops'.
        self.space = Workspace(
            fresh_TD=None, scores=empty, pooled=empty, select=empty.int(), partials=partials
        )

    def measure(
        self, shape: Shape, config: Config, calls: Sequence[Call], num_tokens: int
    ) -> dict[str, object]:
        """Check, time, check the last call."""
        row: dict[str, object] = {"shape": shape.label, "config": config.name}
        row |= {"target_us": shape.target_us, "tile": config.tile and asdict(config.tile)}
        kernel = Fixed(config, num_tokens)
        try:
            row["error"] = self._checked(calls[0], kernel, config)
            if self.flush is not None:
                row["us"] = self._time_us(calls, kernel, config)
                row["error_after"] = self._checked(calls[-1], None, config)
        except Exception as problem:  # noqa: BLE001 - a configuration may not fit the GPU; the others go on
            row["problem"] = f"{type(problem).__name__}: {problem}"[-300:]
        return row

    def _checked(self, call: Call, kernel: TritonAttention | None, config: Config) -> float:
        """Error of what the kernel writes into NaN; without a kernel, of what is there."""
        sink_H, rope = self._sink(call), self._rope(call, config)
        if kernel is not None:
            call.out_THD.fill_(torch.nan)
            call.run(kernel, sink_H, rope, self.space)
        return error_of(call, sink_H, rope)

    def _time_us(self, calls: Sequence[Call], kernel: TritonAttention, config: Config) -> float:
        assert self.flush is not None
        sink_H, rope = self._sink(calls[0]), self._rope(calls[0], config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call.run(kernel, sink_H, rope, self.space)
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            self.flush.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        return float(statistics.median(times)) / len(calls)

    def _sink(self, call: Call) -> Tensor:
        return torch.linspace(-1, 2, call.q_THD.shape[1], device=self.device)

    def _rope(self, call: Call, config: Config) -> RopeTable | None:
        tokens = call.q_THD.shape[0]
        if not config.rope:
            return None
        return RopeTable(self.rope.cos_TP[:tokens], self.rope.sin_TP[:tokens])


def report(row: dict[str, object]) -> str:
    """One line."""
    head = f"{row['shape']!s:26} {row['config']!s:28}"
    if "problem" in row:
        return f"{head} {row['problem']}"
    us, target, error, after = (
        float(str(row[key])) for key in ("us", "target_us", "error", "error_after")
    )
    worst = max(error, after)
    verdict = (
        "WRONG" if not worst <= MAX_ERROR else "met" if us <= target else f"{us / target:.2f}x"
    )
    return f"{head} {us:9.1f} us   target {target:7.1f}   {verdict:6} error {worst:.1e}"


def compile_ahead(jobs: Sequence[tuple[Shape, Config]]) -> None:
    """Fills triton's cache on disk; in a process of its own, on tables too small to matter."""
    benches: dict[str, Bench] = {}
    device = torch.device("cuda")
    for shape, config in jobs:
        if shape.row_format not in benches:
            benches[shape.row_format] = Bench(shape.row_format, 4096, device, timed=False)
        bench = benches[shape.row_format]
        small = evolve(shape, tokens=min(shape.tokens, 2), prefill=False)
        calls = list(make_calls(small, bench.view, 1))
        bench.measure(small, config, calls, shape.tokens)


def compile_all(jobs: Sequence[tuple[Shape, Config]], processes: int) -> None:
    """All kernels, side by side."""
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=compile_ahead, args=(jobs[i::processes],)) for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def sweep(
    device: torch.device, shapes: Sequence[tuple[Shape, tuple[Config, ...]]]
) -> Iterator[dict[str, object]]:
    """Rows of the record."""
    for form in dict.fromkeys(shape.row_format for shape, _ in shapes):
        bench = Bench(form, TABLE_ROWS, device, timed=True)
        for shape, configs in shapes:
            if shape.row_format != form:
                continue
            own = shape.tokens * (shape.window + shape.entries)
            count = 2 if shape.prefill else max(2, min(96, TABLE_ROWS // own))
            calls = list(make_calls(shape, bench.view, count))
            for config in configs:
                yield bench.measure(shape, config, calls, shape.tokens)
            del calls
        del bench
        torch.cuda.empty_cache()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file; default $OUT/attend_sweep.json")
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    options = parser.parse_args(argv)
    shapes = [(shape, configs) for shape, configs in SHAPES if options.only in shape.label]
    jobs = [(shape, config) for shape, configs in shapes for config in configs]
    began = time.perf_counter()
    compile_all(jobs, min(options.processes, len(jobs)))
    print(f"compiled in {time.perf_counter() - began:.0f} s")
    device = torch.device("cuda")
    rows = []
    for row in sweep(device, shapes):
        rows.append(row)
        print(report(row), flush=True)
    print(f"done in {time.perf_counter() - began:.0f} s")
    out = options.out or Path(os.environ.get("OUT", ".")) / "attend_sweep.json"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    record = {"machine": torch.cuda.get_device_name(), "versions": versions, "rows": rows}
    out.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
