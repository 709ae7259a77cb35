"""Fill: all shared tensors of a forward, for few layers and for all; and what computing swa_loc in each layer costs.

Legend: T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from dsv4.bench.case import Case, Setup
from dsv4.bench.forwards import BareForward
from dsv4.config import ModelConfig
from dsv4.metadata import fill_ref as ref
from dsv4.metadata.buffers import Buffers
from dsv4.metadata.fill import TorchFill
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import IndexStream

BATCH, SMALL_BATCH = 256, 3
CONTEXT, SMALL_CONTEXT = 131_072, 512
CHUNK, SMALL_CHUNK = 4096, 24
NUM_FORWARDS = 32
NUM_SWA_LOC = 8
ANGLE_TOLERANCE = 1e-3
"""cos and sin of angles up to 1e5: one fp32 step of the angle is 8e-3, but reference and kernel round it alike."""


def cases(setup: Setup) -> Iterator[Case]:
    """Decode at 128K of context, a chunk behind as much, decode with one layer of each kind; swa_loc by itself."""
    name, model = next(iter(setup.models.items()))
    batch = SMALL_BATCH if setup.small else BATCH
    context = SMALL_CONTEXT if setup.small else CONTEXT
    chunk = SMALL_CHUNK if setup.small else CHUNK
    lengths = [context - 1 - 7 * b for b in range(batch)]
    decode = functools.partial(
        BareForward.of, lengths=lengths, query_lengths=[1] * batch, device=setup.device, max_context=context
    )  # fmt: skip
    few = _one_layer_of_each_kind(model)
    num_forwards = min(NUM_FORWARDS, setup.max_calls)
    for layers in (model, few):
        size = f"b={batch}, {len(layers.layers)} layers"
        yield _case(setup, name, size, [decode(layers) for _ in range(num_forwards)])
    chunks = [
        BareForward.of(model, [context - chunk], [chunk], setup.device, max_context=context)
        for _ in range(num_forwards)
    ]
    yield _case(setup, name, f"{chunk:,} tokens", chunks)
    forwards = [decode(few) for _ in range(min(NUM_SWA_LOC, setup.max_calls))]
    for repeats in (1, len(model.layers)):
        yield _swa_loc_case(setup, name, f"b={batch}", forwards, repeats)


def _one_layer_of_each_kind(model: ModelConfig) -> ModelConfig:
    first = {layer.kind: layer for layer in reversed(model.layers)}
    layers = tuple(
        attrs.evolve(layer, entry_source=i, index_source=i)
        for i, layer in enumerate(first.values())
    )
    return attrs.evolve(model, layers=layers, num_hidden_layers=len(layers))


def _case(setup: Setup, name: str, size: str, forwards: list[BareForward]) -> Case:
    calls = []
    for forward in forwards:
        calls.append(functools.partial(forward.filler(setup.kernels.fill).fill, forward.shape))

    def check() -> float:
        for tensor in forwards[0].buffers.tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        found = _tensors(calls[0]())
        own = attrs.evolve(forwards[0], buffers=_copied(forwards[0]))
        wanted = _tensors(own.fill(TorchFill))
        return max(_difference(found[key], wanted[key]) for key in wanted)

    outputs = _tensors(calls[0]())
    return Case(
        name=name,
        size=size,
        calls=calls,
        check=check,
        tolerance=ANGLE_TOLERANCE,
        nbytes=float(sum(t.numel() * t.element_size() for t in outputs.values())),
    )


def _copied(forward: BareForward) -> Buffers:
    """Buffers of the same inputs and no outputs."""
    other = BareForward.of(
        forward.model, [0] * forward.shape.num_requests, forward.shape.query_lengths,
        forward.pool.device, max_context=forward.shape.max_length,
    )  # fmt: skip
    return other.buffers


def _tensors(shared: SharedTensors) -> dict[str, Tensor]:
    """Every tensor that fill writes, by its path, once."""
    found: dict[str, Tensor] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, Tensor):
            if not any(value is other for other in found.values()):
                found[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(f"{path}[{key}]", item)
        elif attrs.has(type(value)):
            # Rows of a stream that select fills are not fill's.
            rest = isinstance(value, IndexStream) and not value.final
            for field in attrs.fields(type(value)):  # type: ignore[arg-type]
                if field.name != "derived" and not (rest and field.name == "indices_N"):
                    walk(f"{path}.{field.name}", getattr(value, field.name))

    walk("", shared)
    return found


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Integers must be equal; cos and sin close."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else float("inf")
    difference = (found.double() - wanted.double()).abs().nan_to_num(nan=torch.inf)
    return float(difference.max()) if difference.numel() else 0.0


def _swa_loc_case(
    setup: Setup, name: str, size: str, forwards: list[BareForward], repeats: int
) -> Case:
    """`repeats` times, as an engine does that computes it in each layer, in torch as such engines do."""

    def run(forward: BareForward) -> Tensor:
        buffers, shape = forward.buffers, forward.shape
        for _ in range(repeats):
            inputs = ref.live_requests(
                buffers.view("slots", shape.num_requests + 1),
                buffers.view("starts", shape.num_requests + 1),
                buffers.view("query_lengths", shape.num_requests + 1),
                forward.pool.lengths,
            )
            tokens = ref.plan_tokens(inputs, shape, forward.geometry.in_place_tokens)
            rows_T = ref.swa_loc(tokens, forward.geometry)
        return rows_T

    def check() -> float:
        forward = forwards[0]
        lengths, ring = forward.pool.lengths.tolist(), forward.geometry.ring_rows
        wanted = [slot * ring + length % ring for slot, length in enumerate(lengths)]
        return 0.0 if run(forward).tolist() == wanted else float("inf")

    layers = "once" if repeats == 1 else f"in each of {repeats} layers"
    return Case(
        name=f"{name}-swa_loc",
        size=f"{size}, {layers}",
        calls=[functools.partial(run, forward) for forward in forwards],
        check=check,
        tolerance=0.0,
        nbytes=4.0 * forwards[0].shape.num_tokens,
    )
