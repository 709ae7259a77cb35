"""The training step, eager or as one replayed CUDA graph, and the phases that it runs in.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from dsv4.model.block import Block
from dsv4.model.decoder import Decoder
from tiny_training.data import Batch
from tiny_training.dense import DenseForward, DenseMode
from tiny_training.loss import step_loss
from tiny_training.regions import Regions
from tiny_training.weights import round_as_stored, trainable

WARM_STEPS = 3
"""Eager steps before a capture: they compile, and let the allocator and the optimizer settle."""
TIMED_STEPS = 5
WARMUP_STEPS = 200
"""Steps over which the learning rate rises."""
BALANCE_RATE = 1e-3
"""Selection bias that an over-used expert loses each step (auxiliary-loss-free balancing)."""


@frozen(kw_only=True)
class Phase:
    name: str
    num_sequences: int
    num_tokens: int
    sparse: bool
    """Train with the indexer's own selection instead of every visible entry."""
    rounded: bool
    """Train with weights in their published formats."""
    share: float
    """Of the training time."""
    recall: float
    """Share of the samples with a key."""
    max_asks: int


class Trainer:
    """Model, masters and optimizer; one `step` callable per phase."""

    def __init__(
        self, model: Decoder, *, peak_rate: float, regions: Regions, graph: bool = True
    ) -> None:
        self.model, self._regions, self._peak, self._graph = model, regions, peak_rate, graph
        self._device = model.embed.device
        self._weights: list[Tensor] = list(trainable(model).values())
        self._masters = [weight.detach().clone() for weight in self._weights]
        for weight in self._weights:
            weight.requires_grad_(True)
        on_gpu = self._device.type == "cuda"
        self._rate = torch.zeros((), device=self._device)
        groups = [
            {"params": [m for m in self._masters if m.dim() >= 2], "weight_decay": 0.05},
            {"params": [m for m in self._masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=self._rate, betas=(0.9, 0.95), fused=True, capturable=on_gpu
        )
        self.num_steps, self._progress = 0, 0.0

    def set_progress(self, progress: float) -> None:
        """Learning rate of the next steps: a short rise, then a cosine from the peak to zero over the training time."""
        self._progress = progress
        rise = min(1.0, (self.num_steps + 1) / WARMUP_STEPS)
        self._rate.fill_(self._peak * rise * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))

    def prepare(self, phase: Phase, data: Iterator[Batch]) -> Callable[[Batch], Tensor]:
        """The step of a phase: takes a batch, returns the step's METRICS (valid until the next step)."""
        mode = DenseMode(sparse=phase.sparse, index_loss=True)
        forward = DenseForward(self.model, phase.num_tokens, mode, self._regions)

        def step(batch: Batch) -> Tensor:
            here = Batch(*(t.to(self._device) for t in _tensors(batch)))
            return self._step(forward, here, rounded=phase.rounded)

        if self._device.type != "cuda" or not self._graph:
            return step
        return self._captured(step, data)

    def _step(self, forward: DenseForward, batch: Batch, *, rounded: bool) -> Tensor:
        output = forward(batch.ids_BS)
        loss, metrics = step_loss(output, batch)
        for weight in self._weights:
            weight.grad = None
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = weight.grad
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
            if rounded:
                round_as_stored(self.model)
            self._balance(output.expert_load_LX)
        return torch.cat((metrics, norm.detach().reshape(1)))

    def _balance(self, load_LX: Tensor) -> None:
        blocks = [*self.model.layers, *self.model.mtp]
        for block, load_X in zip(blocks, load_LX, strict=False):
            assert isinstance(block, Block)
            if not block.ffn.gate.hashed:
                block.ffn.gate.bias.add_(torch.sign(load_X.mean() - load_X), alpha=BALANCE_RATE)

    def _captured(
        self, step: Callable[[Batch], Tensor], data: Iterator[Batch]
    ) -> Callable[[Batch], Tensor]:
        static = Batch(*(t.to(self._device) for t in _tensors(next(data))))

        def load(batch: Batch) -> None:
            for target, source in zip(_tensors(static), _tensors(batch), strict=True):
                target.copy_(source)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                load(next(data))
                step(static)
                self.num_steps += 1
                self.set_progress(self._progress)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            metrics = step(static)

        def replay(batch: Batch) -> Tensor:
            load(batch)
            graph.replay()
            return metrics

        return replay

    def run(
        self, phase: Phase, data: Iterator[Batch], *, until: float, done: float,
        report: Callable[[int, Tensor], None], num_steps: int | None = None,
        profile: Path | None = None,
    ) -> None:  # fmt: skip
        """Train for one phase: `num_steps`, or as many as fit until the clock (time.monotonic) reads `until`.
        `done` is the share of the training that is over; `report` gets (steps so far, metrics); `profile` is a folder
        for a table of the kernels of one step."""
        begin = time.monotonic()
        self.set_progress(done)
        step = self.prepare(phase, data)
        self._wait()
        ready = time.monotonic()
        for batch in islice(data, TIMED_STEPS):
            step(batch)
            self.num_steps += 1
        self._wait()
        seconds = (time.monotonic() - ready) / TIMED_STEPS
        total = num_steps or max(1, int((until - time.monotonic()) / seconds))
        print(
            f"phase {phase.name}: ready after {ready - begin:.1f} s, {1000 * seconds:.1f} ms a step, {total} steps",
            flush=True,
        )
        if profile is not None:
            self._profile(step, next(data), profile / f"kernels-{phase.name}.txt")
        for i, batch in enumerate(islice(data, total)):
            self.set_progress(done + phase.share * i / total)
            metrics = step(batch)
            self.num_steps += 1
            if i % 50 == 49 or i == total - 1:
                report(self.num_steps, metrics)
            if i % 50 == 0 and num_steps is None and time.monotonic() > until:
                break

    def _profile(self, step: Callable[[Batch], Tensor], batch: Batch, path: Path) -> None:
        with torch.profiler.profile() as profiler:
            step(batch)
            self._wait()
        on_gpu = self._device.type == "cuda"
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
        path.write_text(str(table))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.ids_BS, batch.weights_BS
