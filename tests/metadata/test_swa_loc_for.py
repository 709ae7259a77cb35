"""The one fallback outside the layer path is exact for every batch, and says when it had to recompute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from dsv4.config import UnifiedPoolConfig
from dsv4.metadata.base import MetadataBuilder
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import KVPool
from dsv4.testing.expected import ExpectedForward
from dsv4.testing.models import pool_config, small_model
from dsv4.testing.player import build_builder, build_pool
from tests.metadata.forwards import Drawn, batch_of, drawn, set_length


@pytest.fixture
def setting() -> tuple[KVPool, MetadataBuilder]:
    """Slots 0..3 at lengths 5, 12, 5, 40; the filled batch is slot 1 with two tokens and slot 3 with one."""
    model = small_model()
    config = pool_config(UnifiedPoolConfig, model, in_place_tokens=2)
    pool = build_pool(config, model, torch.device("cpu"))
    for length in (5, 12, 5, 40):
        slot = pool.acquire()
        pool.reserve(slot, 96)
        set_length(pool, slot, length)
    builder = build_builder(pool)
    builder.prepare(batch_of({1: 2, 3: 1}))
    builder.fill()
    return pool, builder


Setting = tuple[KVPool, MetadataBuilder]


def asked(builder: MetadataBuilder, batch: ForwardBatch | None) -> tuple[list[int], list[str]]:
    """The rows, and the logged reasons."""
    with capture_logs() as logs:
        loc_T = builder.swa_loc_for(batch)
    assert loc_T.dtype == torch.int32
    assert {log["event"] for log in logs} <= {"swa_loc_recomputed"}
    return loc_T.tolist(), [log["reason"] for log in logs]


def test_the_current_batch_gives_the_stored_tensor(setting: Setting) -> None:
    _, builder = setting
    assert builder.swa_loc_for(batch_of({1: 2, 3: 1})) is builder.metadata.swa_loc_T
    assert asked(builder, batch_of({1: 2, 3: 1}))[1] == []


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (batch_of({1: 0, 3: 0}), "idle"),
        (batch_of({-1: 0}, 4), "idle"),
        (batch_of({1: 2, 3: 1}, 5), "re-padded"),
        (batch_of(((1, 2), (3, 1), (-1, 0))), "re-padded"),
        (batch_of(((1, 2), (-1, 0), (3, 1))), "re-padded"),
        (batch_of({0: 2, 2: 1}), "other slots"),
        (batch_of({3: 2, 1: 1}), "other slots"),
        (batch_of({2: 41}), "other slots"),
        (batch_of({1: 1, 3: 2}), "other positions"),
    ],
)
def test_any_other_batch_is_recomputed_exactly(
    setting: Setting, batch: ForwardBatch, reason: str
) -> None:
    pool, builder = setting
    rows, reasons = asked(builder, batch)
    assert rows == ExpectedForward.on(pool, batch).swa_loc()
    assert reasons == [reason]


def test_no_batch_has_no_rows(setting: Setting) -> None:
    assert asked(setting[1], None) == ([], ["idle"])


def test_a_prefill_of_the_same_shape_in_another_slot_is_recomputed(setting: Setting) -> None:
    pool, builder = setting
    builder.prepare(batch_of({0: 30}))
    builder.fill()
    rows, reasons = asked(builder, batch_of({2: 30}))
    assert rows == ExpectedForward.on(pool, batch_of({2: 30})).swa_loc()
    assert rows != builder.metadata.swa_loc_T.tolist()
    assert reasons == ["other slots"]


def test_moved_lengths_make_the_stored_tensor_stale(setting: Setting) -> None:
    """By a host commit, a rollback and a device advance: shapes and slots stay, positions do not."""
    pool, builder = setting
    batch = batch_of({1: 2, 3: 1})
    for move in (
        lambda: pool.commit(1, 2),
        lambda: pool.rollback(1, 13),
        lambda: builder.advance(torch.tensor([1, 1])),
    ):
        move()
        rows, reasons = asked(builder, batch)
        assert rows == ExpectedForward.on(pool, batch).swa_loc()
        assert reasons == ["other positions"]
    builder.prepare(batch)
    builder.fill()
    assert asked(builder, batch)[1] == []


def test_before_any_fill_rows_are_recomputed(setting: Setting) -> None:
    pool, _ = setting
    rows, reasons = asked(build_builder(pool), batch_of({3: 2}))
    assert rows == ExpectedForward.on(pool, batch_of({3: 2})).swa_loc()
    assert reasons == ["other slots"]


@given(drawn=drawn(), other=st.permutations(range(5)), num=st.integers(0, 20))
@settings(max_examples=40)
def test_every_batch_gets_its_own_rows(drawn: Drawn, other: list[int], num: int) -> None:
    pool, batch = drawn.pool(), drawn.batch()
    builder = build_builder(pool, max_batch_tokens=480)
    builder.prepare(batch)
    builder.fill()
    live = [slot for slot in other if slot < len(drawn.lengths)]
    strangers = batch_of({slot: (num + slot) % 21 for slot in live}, num % 3)
    for asked_for in (batch, strangers, batch.padded(num_tokens=batch.num_tokens + 2), batch):
        rows, _ = asked(builder, asked_for)
        assert rows == ExpectedForward.on(pool, asked_for).swa_loc()
