"""The Triton fill writes, in one launch, byte for byte the buffers that the torch fill writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.config import ModelConfig, UnifiedPoolConfig
from dsv4.metadata import fill_triton
from dsv4.metadata.base import FillKernel, MetadataBuilder
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.buffers import Buffers
from dsv4.metadata.fill import TorchFill
from dsv4.metadata.fill_table import make_sections, num_sections
from dsv4.metadata.fill_tiles_triton import NEVER, rows_below
from dsv4.metadata.fill_triton import DECODE, PREFILL, Tiles, TritonFill, variants
from dsv4.metadata.plans import RopeKey
from dsv4.metadata.rope import inverse_frequencies
from dsv4.pool.base import KVPool
from dsv4.testing.builder import leaves
from dsv4.testing.compare import differences
from dsv4.testing.expected import ExpectedForward
from dsv4.testing.memory import poison_of, same_bytes
from dsv4.testing.models import CSA, HCA, SLIDING, Layers, backend_config, pool_config, small_model
from dsv4.testing.player import build_pool
from tests.metadata.forwards import MAX_TOKENS, SCHEDULES, Drawn, batch_of, drawn, set_length

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPOSITORY = Path(__file__).resolve().parents[2]
INPUTS = {"slots", "starts", "query_lengths", "token_ids"}
TRIGONOMETRY = 1e-6
"""Difference of two libraries' cos and sin of the same fp32 angle; the angle itself is the same product."""
ODD = Tiles(
    scan=2,
    tokens=8,
    stream_tokens=2,
    lanes=16,
    repeat=4,
    closing=4,
    columns=4,
    rope_rows=4,
    pairs=2,
)
"""So small that every sum and every width takes several tiles."""


def pool_of(example: Drawn) -> KVPool:
    """As `Drawn.pool`, on the device."""
    pool = build_pool(example.config, example.model, DEVICE)
    for length in example.lengths:
        slot = pool.acquire()
        pool.reserve(slot, min(length + MAX_TOKENS, example.config.max_context))
        set_length(pool, slot, length)
    return pool


def filled(
    pool: KVPool, batch: ForwardBatch, fill: type[FillKernel], *, max_batch_tokens: int = 480
) -> MetadataBuilder:
    """A builder whose buffers held poison before it filled them."""
    config = backend_config(pool.config, max_batch_tokens=max_batch_tokens)
    builder = pool.builder_class()(pool, config, fill)
    builder.prepare(batch)
    for name, buffer in tensors(builder).items():
        if name not in INPUTS:
            buffer.fill_(poison_of(buffer.dtype))
    builder.fill()
    return builder


def tensors(builder: MetadataBuilder) -> Mapping[str, Tensor]:
    buffers: Buffers = builder._buffers  # type: ignore[attr-defined]
    return buffers.tensors


def unequal(left: MetadataBuilder, right: MetadataBuilder) -> list[str]:
    """Buffers that differ anywhere, in what no view shows too."""
    found = []
    for name in tensors(left).keys() - INPUTS:
        a, b = tensors(left)[name], tensors(right)[name]
        if a.dtype == torch.float32:
            same = torch.allclose(a, b, rtol=0, atol=TRIGONOMETRY, equal_nan=True)
        else:
            same = same_bytes(a, b)
        found += [] if same else [name]
    return found


def places(builder: MetadataBuilder) -> dict[str, tuple[object, ...]]:
    """Of each shared tensor: whose buffer's prefix it is, and its shape."""
    names = {t.data_ptr(): name for name, t in tensors(builder).items() if t.numel()}
    return {
        path: (names.get(tensor.data_ptr()) if tensor.numel() else None, tuple(tensor.shape))
        for path, tensor in leaves(builder.metadata.shared).items()
    }


def check(example: Drawn) -> None:
    batch = example.batch()
    right = filled(pool_of(example), batch, TorchFill)
    ours = filled(pool_of(example), batch, TritonFill)
    assert unequal(ours, right) == []
    assert places(ours) == places(right)
    assert ours.computed == right.computed
    for stream in (
        ours.metadata.shared.window_stream,
        *ours.metadata.shared.entry_streams.values(),
    ):
        assert stream.derived == {}


@given(example=drawn())
@settings(max_examples=120)
def test_every_byte_of_every_buffer_is_what_torch_writes(example: Drawn) -> None:
    check(example)


@pytest.mark.parametrize("tiles", [ODD, DECODE, PREFILL], ids=["odd", "decode", "prefill"])
def test_results_do_not_depend_on_the_tiles(tiles: Tiles) -> None:
    @given(example=drawn())
    @settings(max_examples=8)
    def check_tiled(example: Drawn) -> None:
        with patch.object(fill_triton, "choose_tiles", lambda _num_tokens: tiles):
            check(example)

    check_tiled()


@pytest.mark.parametrize("layers", SCHEDULES[1:])
def test_every_tensor_is_what_plain_loops_give(layers: Layers) -> None:
    model = small_model(layers, window=5, topk=3)
    config = pool_config(UnifiedPoolConfig, model, in_place_tokens=3, max_context=400)
    pool = build_pool(config, model, DEVICE)
    for length in (0, 61, 260):
        slot = pool.acquire()
        pool.reserve(slot, 300)
        set_length(pool, slot, length)
    for sizes in (((0, 9), (-1, 2), (2, 1)), ((2, 3), (1, 4), (-1, 0), (0, 0)), ((1, 0),)):
        batch = batch_of(sizes, padding=2)
        builder = filled(pool, batch, TritonFill)
        assert differences(builder.metadata.shared, ExpectedForward.on(pool, batch)) == []
        for slot, num in sizes:
            if slot >= 0:
                pool.commit(slot, num)


def test_requests_beyond_one_scan_are_counted() -> None:
    """Sums over more requests than a program adds up at a time, with idle ones and padding in between."""
    model = small_model([(CSA, 3), (HCA, 7)])
    config = pool_config(UnifiedPoolConfig, model, max_requests=70, in_place_tokens=5)
    sizes = [(slot, (1, 0, 5, 6, 2)[slot % 5]) for slot in range(70)]
    sizes[13] = (-1, 1)
    pairs = []
    for fill in (TorchFill, TritonFill):
        pool = build_pool(config, model, DEVICE)
        for slot in range(70):
            assert pool.acquire() == slot
            pool.reserve(slot, 60)
            set_length(pool, slot, (11 * slot) % 53)
        pairs.append(filled(pool, batch_of(tuple(sizes), padding=3), fill))
    assert unequal(*pairs) == []


def test_an_empty_batch_has_empty_tensors() -> None:
    model = small_model()
    pool = build_pool(pool_config(UnifiedPoolConfig, model), model, DEVICE)
    slot = pool.acquire()
    for batch in (batch_of({}), batch_of({slot: 0}), batch_of({-1: 0}, padding=2)):
        builder = filled(pool, batch, TritonFill)
        assert differences(builder.metadata.shared, ExpectedForward.on(pool, batch)) == []
        assert unequal(builder, filled(pool, batch, TorchFill)) == []


class Launches:
    """Stands in for the kernel: counts, and launches nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Launches:
        assert all(grid)
        self.count += 1
        return self

    def __call__(self, *_args: object, **_options: object) -> None: ...


class Calls(TorchDispatchMode):
    """Names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_layers", [5, 61])
def test_a_forward_is_one_launch_for_any_number_of_layers(num_layers: int) -> None:
    kinds = [(SLIDING, 0), (CSA, 4), (HCA, 6), (HCA, 7), (CSA, 3)]
    model = small_model([kinds[i % 5] for i in range(num_layers)])
    config = pool_config(UnifiedPoolConfig, model, max_requests=2, num_pages=4)
    pool = build_pool(config, model, DEVICE)
    slot = pool.acquire()
    pool.reserve(slot, 60)
    for num in (41, 1):  # a prefill as well
        builder = filled(pool, batch_of({slot: num}), TritonFill)
        fill: FillKernel = builder._fill  # type: ignore[attr-defined]
        with patch.object(fill_triton, "_fill_kernel", Launches()) as kernel, Calls() as calls:
            fill.fill(builder.metadata.shape)
        assert kernel.count == 1
        assert calls.names == []
        assert set(builder.computed.values()) == {1}
        pool.commit(slot, num)


def test_angles_of_a_million_positions_are_reduced_exactly() -> None:
    """The fp32 angle is given; its cosine and sine are those of a float64 library."""
    model = small_model([(SLIDING, 0), (HCA, 128)], drafts=0)
    config = pool_config(
        UnifiedPoolConfig, model, max_requests=1, max_context=2**20, page_tokens=2**17
    )
    pool = build_pool(config, model, DEVICE)
    slot = pool.acquire()
    pool.reserve(slot, 2**20)
    bases = {layer.rope_theta: layer for layer in model.layers}
    for length in (0, 105_600, 2**20 - 150):
        set_length(pool, slot, length)
        builder = filled(pool, batch_of({slot: 130}), TritonFill)
        shared = builder.metadata.shared
        tables = [(key.theta, table, shared.positions_T) for key, table in shared.ropes.items()]
        plan = shared.state_plans[HCA, 128]
        entries_E = torch.arange(length // 128, (length + 130) // 128, device=DEVICE)
        tables.append((160_000.0, plan.entry_rope, 128 * entries_E))
        for theta, table, positions in tables:
            frequencies_P = inverse_frequencies(theta, 8, bases[theta].yarn).to(DEVICE)
            angle = (positions.float().unsqueeze(1) * frequencies_P).double()
            rows = angle.shape[0]
            torch.testing.assert_close(table.cos_TP[:rows].double(), angle.cos(), rtol=0, atol=2e-7)
            torch.testing.assert_close(table.sin_TP[:rows].double(), angle.sin(), rtol=0, atol=2e-7)
        pool.commit(slot, 130)


def test_the_compiler_keeps_the_full_range_of_cos_and_sin() -> None:
    """NVIDIA's approximate instructions are wrong by whole turns' rounding at large angles."""
    program = (
        "from dsv4 import triton_launch as t; from dsv4.metadata.fill_triton import variants; "
        "v = variants()[0]; names = v.fn.arg_names; import triton; "
        "sig = {n: v.signature.get(n, 'constexpr') for n in names}; "
        "c = {(names.index(n),): x for n, x in v.constexprs.items()}; "
        "src = triton.compiler.ASTSource(v.fn, sig, c, {}); "
        "print(triton.compile(src, target=t.TARGETS['sm_90'].gpu).asm['ptx'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "st.global" in run.stdout
    assert "cos.approx" not in run.stdout
    assert "sin.approx" not in run.stdout


@triton.jit(do_not_specialize=["committed", "num", "ratio", "cap", "full"])
def _sum_kernel(out_ptr, committed, num, ratio, cap, full):
    tl.store(out_ptr, rows_below(committed, num, ratio, cap, full))


@given(
    committed=st.one_of(st.integers(0, 40), st.integers(0, 2**20)),
    num=st.integers(0, 2000),
    ratio=st.one_of(st.integers(1, 9), st.sampled_from([128, 1000])),
    cap=st.one_of(st.none(), st.integers(0, 1030)),
)
@settings(max_examples=80)
def test_rows_of_consecutive_tokens_add_up(
    committed: int, num: int, ratio: int, cap: int | None
) -> None:
    out = torch.empty(1, dtype=torch.int32, device=DEVICE)
    limits = (NEVER.value, NEVER.value) if cap is None else (cap, cap * ratio)
    _sum_kernel[(1,)](out, committed, num, ratio, *limits)
    visible = ((committed + i) // ratio for i in range(1, num + 1))
    wanted = sum(n if cap is None else min(cap, n) for n in visible)
    if wanted < 2**31:  # more lanes than a stream can have
        assert out.item() == wanted


@pytest.mark.parametrize("layers", SCHEDULES)
def test_the_number_of_sections_needs_no_pool(layers: Layers) -> None:
    model = small_model(layers)
    pool = build_pool(pool_config(UnifiedPoolConfig, model), model, DEVICE)
    frequencies = {
        key: inverse_frequencies(key.theta, 8, key.yarn)
        for key in (RopeKey.of(layer) for layer in model.layers)
    }
    sections = make_sections(model, pool.geometry, frequencies)
    assert len(sections) == num_sections(model)
    names = [name for section in sections for name in section.buffers]
    assert len(names) == len(set(names))


def test_the_published_models_share_two_compiled_kernels() -> None:
    assert len(variants()) == 2
    for preset in ("flash", "pro"):
        model = ModelConfig.preset(preset)
        assert num_sections(model) <= len(variants()[0].signature["begins"])


def test_what_varies_from_step_to_step_is_never_compiled_in() -> None:
    """The launcher specialises on 1 and on multiples of 16."""
    coded = [fill_triton._coded(number) for number in range(4096)]
    assert all(number % 16 and number != 1 for number in coded)
    assert len(set(coded)) == 4096


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures a CUDA graph")
def test_a_replayed_graph_follows_lengths_slots_and_pages() -> None:
    model = small_model()
    config = pool_config(UnifiedPoolConfig, model, in_place_tokens=2)
    pool = build_pool(config, model, DEVICE)
    for length in (3, 30, 61):
        slot = pool.acquire()
        pool.reserve(slot, 96)
        set_length(pool, slot, length)
    builder = filled(pool, batch_of({0: 1, 2: 2}), TritonFill)
    fill: FillKernel = builder._fill  # type: ignore[attr-defined]
    bucket = evolve(builder.metadata.shape, lengths=None, max_length=96)
    fill.fill(bucket)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shared = fill.fill(bucket)
    for sizes in ({0: 1, 2: 2}, {1: 2, 0: 1}, {2: 1, 1: 1}):
        builder.prepare(batch_of(sizes, padding=3 - sum(sizes.values())))
        graph.replay()
        seen = {name: tensor.clone() for name, tensor in leaves(shared).items()}
        fill.fill(bucket)
        for name, tensor in leaves(shared).items():
            assert same_bytes(tensor, seen[name]), name
        for slot, num in sizes.items():
            pool.commit(slot, num)
