"""Whole forwards in the interpreter: no kernel touches memory outside of the tensors that it was given."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
import triton.language as tl

import dsv4
from dsv4.triton_launch import interpreting
from tests.kernels.bounds_guard import bounds_guard

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels run natively here")


@triton.jit
def _astray_kernel(x_ptr, NUM: tl.constexpr, SHIFT: tl.constexpr, STORES: tl.constexpr):
    lane = tl.arange(0, NUM)
    x = tl.load(x_ptr + lane)
    if STORES:
        tl.store(x_ptr + lane + SHIFT, x)
    else:
        tl.store(x_ptr + lane, tl.load(x_ptr + lane + SHIFT))


@pytest.mark.parametrize("stores", [False, True])
def test_an_access_one_element_too_far_is_found(stores: bool) -> None:
    # the launch is given 16 values, its neighbours belong to somebody else
    whole = torch.zeros(64)
    own = torch.from_numpy(whole.numpy()[:16])
    for shift in (0, 1):
        with bounds_guard() as guard:
            _astray_kernel[(1,)](own, NUM=16, SHIFT=shift, STORES=stores)
        assert bool(guard.faults) is bool(shift)


@pytest.mark.parametrize("pool", [dsv4.UnifiedPoolConfig, dsv4.ThreePoolConfig])
def test_a_chunk_a_verify_and_a_decode_stay_within_their_tensors(
    pool: type[dsv4.PoolConfig],
) -> None:
    config = dsv4.BackendConfig(
        pool=pool(max_requests=3, max_context=256, in_place_tokens=2, row_format="fp8", index_format="fp8"),
        kernels="triton", max_batch_tokens=96,
    )  # fmt: skip
    model = dsv4.load("tiny", backend=config)
    memory = model.backend.pool
    slots = [memory.acquire() for _ in range(2)]
    for slot in slots:
        memory.reserve(slot, 200)
    with warnings.catch_warnings(), bounds_guard() as guard:
        warnings.simplefilter("ignore")
        for sizes in ((70, 9), (1, 2), (1, 1)):
            ids = [[(7 * s + i) % 250 for i in range(n)] for s, n in zip(slots, sizes, strict=True)]
            batch = dsv4.ForwardBatch.of(list(zip(slots, ids, strict=True)))
            model.forward(batch.padded(num_tokens=batch.num_tokens + 1))
            for slot, num in zip(slots, sizes, strict=True):
                memory.commit(slot, num)
    assert guard.faults == set()
    assert {"_attend_kernel", "_store_kernel", "_score_kernel"} <= guard.kernels
