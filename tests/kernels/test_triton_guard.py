"""No kernel computes on bf16 values under the interpreter, where that is silently wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
import triton.language as tl

import dsv4
from dsv4.kernels.tile_triton import cast, to_fp32
from dsv4.triton_launch import interpreting
from tests.kernels.bf16_guard import bf16_guard
from tests.kernels.compile_variants import all_variants

NUM = tl.constexpr(16)

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="kernels run natively here")


@triton.jit
def _good_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, NUM)
    x = to_fp32(tl.load(x_ptr + lane, mask=lane < 11, other=0.0))
    tl.store(out_ptr + lane, cast(x * 1.1 + tl.sum(x), tl.bfloat16))


@triton.jit
def _product_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, NUM)
    x = tl.load(x_ptr + lane)
    tl.store(out_ptr + lane, x * x)


@triton.jit
def _minus_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, NUM)
    tl.store(out_ptr + lane, -tl.load(x_ptr + lane))


@triton.jit
def _reduce_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.arange(0, NUM))
    tl.store(out_ptr, tl.reduce(x, 0, _first))


@triton.jit
def _first(a, b):
    return a


@triton.jit
def _dot_kernel(x_ptr, out_ptr):
    row, lane = tl.arange(0, NUM)[:, None], tl.arange(0, NUM)[None, :]
    x = tl.load(x_ptr + (row + lane) % NUM)
    tl.store(out_ptr + row * NUM + lane, tl.dot(x, x))


@triton.jit
def _cut_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, NUM)
    tl.store(out_ptr + lane, to_fp32(tl.load(x_ptr + lane)) * 1.1)


@triton.jit
def _count_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, NUM)
    tl.store(out_ptr + lane, lane.to(tl.bfloat16))


@needs_interpreter
@pytest.mark.parametrize(
    ("kernel", "out", "fault"),
    [
        (_product_kernel, torch.bfloat16, "fmul on bf16"),
        (_minus_kernel, torch.bfloat16, "on bf16"),
        (_reduce_kernel, torch.bfloat16, "reduction of bf16"),
        (_dot_kernel, torch.float32, "dot on bf16"),
        (_cut_kernel, torch.bfloat16, "to bf16 that is not exact"),
        (_count_kernel, torch.bfloat16, "to bf16 that is not exact"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_guard_catches_bf16_arithmetic(kernel: object, out: torch.dtype, fault: str) -> None:
    x = torch.linspace(-1, 2, 16).bfloat16()
    with bf16_guard() as guard:
        kernel[(1,)](x, torch.empty(16, 16, dtype=out))
    assert any(fault in found for found in guard.faults), guard.faults


@needs_interpreter
def test_the_guard_lets_upcast_arithmetic_pass(no_bf16_arithmetic) -> None:
    x = torch.linspace(-1, 2, 16).bfloat16()
    _good_kernel[(1,)](x, torch.empty_like(x))
    assert no_bf16_arithmetic.launched == {"_good_kernel"}


CASES = [
    (dsv4.UnifiedPoolConfig, "bf16", "fp8", False),
    (dsv4.ThreePoolConfig, "fp8", "fp4", True),
]
"""Pool, row format, format of indexer keys, deterministic."""


@needs_interpreter
def test_every_kernel_runs_in_forwards_of_a_bf16_model_and_none_computes_on_bf16() -> None:
    with bf16_guard() as guard:
        for case in CASES:
            _forwards(*case)
    assert sorted(guard.faults) == []
    may_see_bf16 = {
        variant.fn.__name__
        for variant in all_variants()
        if {"*bf16", "*u8"} & set(variant.signature.values())
    }
    assert sorted(may_see_bf16 - guard.launched) == []


def _forwards(
    pool: type[dsv4.PoolConfig], row_format: str, index_format: str, deterministic: bool
) -> None:
    """Two chunks, one of which closes windows, then a token each: what is done in place and what is not."""
    memory = pool(max_requests=2, max_context=256, row_format=row_format, index_format=index_format)
    config = dsv4.BackendConfig(
        pool=memory, kernels="triton", deterministic=deterministic, max_batch_tokens=64
    )
    model = dsv4.load("tiny", backend=config, dtype="bfloat16")
    slots = [model.backend.pool.acquire() for _ in range(2)]
    for slot in slots:
        model.backend.pool.reserve(slot, 16)
    first, second = slots
    for batch in ([(first, [5, 6, 7, 8, 9]), (second, [1, 2, 3])], [(first, [10]), (second, [4])]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            logits = model.forward(dsv4.ForwardBatch.of(batch))
        assert bool(logits.isfinite().all())
        for slot, ids in batch:
            model.backend.pool.commit(slot, len(ids))
