"""The table builder: one computation for any number of layers, fixed addresses, exact byte counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from dsv4.backend import Backend
from dsv4.config import BackendConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.errors import BatchError, Dsv4Error, SlotError, StaleMetadataError
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import KVPool
from dsv4.testing.builder import leaves
from dsv4.testing.memory import differing, pool_bytes, tensor_bytes
from dsv4.testing.models import CSA, HCA, SLIDING, pool_config, small_model
from dsv4.testing.player import build_builder, build_pool
from tests.metadata.forwards import Drawn, batch_of, drawn, set_length

CPU = torch.device("cpu")
both_pools = pytest.mark.parametrize("config_type", [UnifiedPoolConfig, ThreePoolConfig])


def a_pool(**options: int) -> KVPool:
    model = small_model()
    config = pool_config(UnifiedPoolConfig, model, in_place_tokens=2, **options)
    return build_pool(config, model, CPU)


@pytest.mark.parametrize("num_layers", [1, 5, 61])
def test_each_shared_tensor_is_computed_once_for_any_number_of_layers(num_layers: int) -> None:
    kinds = [(SLIDING, 0), (CSA, 4), (HCA, 6)]
    layers = [kinds[(2 - i) % 3] for i in range(num_layers)]
    model = small_model(layers, drafts=0)
    config = pool_config(UnifiedPoolConfig, model, max_requests=2, num_pages=4)
    builder = build_builder(pool := build_pool(config, model, CPU))
    slot = pool.acquire()
    pool.reserve(slot, 12)
    for num in (9, 1):  # a prefill as well
        builder.prepare(batch_of({slot: num}))
        epoch = builder.fill()
        for layer in range(num_layers):
            meta = builder.metadata.for_layer(layer, epoch)
            assert meta.store_loc_T is builder.metadata.shared.store_loc_T
            assert meta.sources[0].stream is builder.metadata.shared.window_stream
        assert builder.computed["swa_loc"] == 1
        assert set(builder.computed.values()) == {1}
        pool.commit(slot, num)


def test_a_stale_read_raises_and_names_both_epochs() -> None:
    builder = build_builder(pool := a_pool())
    slot = pool.acquire()
    pool.reserve(slot, 12)
    builder.prepare(batch_of({slot: 1}))
    first = builder.fill()
    kept = builder.metadata.for_layer(2, first)
    second = builder.fill()
    with pytest.raises(StaleMetadataError, match=f"at epoch {second}, asked for {first}"):
        builder.metadata.for_layer(2, first)
    with pytest.raises(
        StaleMetadataError, match=rf"layer 2: metadata of epoch {first} read at epoch"
    ):
        _ = kept.positions_T
    assert builder.metadata.for_layer(2, second).positions_T.tolist() == [0]


@given(drawn=drawn())
@settings(max_examples=25)
def test_a_failing_prepare_changes_nothing(drawn: Drawn) -> None:
    pool, batch = drawn.pool(), drawn.batch()
    builder = build_builder(pool, max_batch_tokens=160)
    if batch.num_tokens > 160:
        return
    builder.prepare(batch)
    builder.fill()
    before = {n: tensor_bytes(t) for n, t in leaves(builder.metadata.shared).items()}
    memory, version, epoch = pool_bytes(pool), pool.version, builder.metadata.epoch
    lengths = pool.lengths.tolist()
    for bad in (
        batch_of({0: 161}),
        batch_of({0: 1}, 160),
        batch_of(tuple((-1, 0) for _ in range(6))),
        batch_of({0: 1, 5: 1}),
        batch_of({0: 1, -7: 1}),
        ForwardBatch(slots=[0, -1], query_lengths=[1, 1], token_ids=[3, 97]),
    ):
        with pytest.raises(Dsv4Error):
            builder.prepare(bad)
    assert builder.metadata.epoch == epoch
    builder.fill()
    after = {n: tensor_bytes(t) for n, t in leaves(builder.metadata.shared).items()}
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert (differing(memory, pool_bytes(pool)), pool.version) == ([], version)
    assert pool.lengths.tolist() == lengths


def test_prepare_says_what_to_raise() -> None:
    builder = build_builder(pool := a_pool(), max_batch_tokens=16)
    slot = pool.acquire()
    pool.reserve(slot, 24)
    with pytest.raises(BatchError, match="17 tokens: the backend holds 16; raise max_batch_tokens"):
        builder.prepare(batch_of({slot: 17}))
    five = ForwardBatch(slots=[slot, -1, -1, -1, -1], query_lengths=[1, 0, 0, 0, 0], token_ids=[1])
    with pytest.raises(BatchError, match="5 requests: the backend holds 4; raise max_batch_req"):
        builder.prepare(five)
    wrong = ForwardBatch(slots=[slot], query_lengths=[1], token_ids=[97])
    with pytest.raises(BatchError, match=r"ids must lie in \[0, 97\)"):
        builder.prepare(wrong)
    with pytest.raises(SlotError, match="slot 3: not live"):
        builder.prepare(batch_of({3: 1}))
    with pytest.raises(BatchError, match="no batch; call prepare"):
        build_builder(pool).fill()
    with pytest.raises(BatchError, match="no batch; call prepare"):
        build_builder(pool).advance(torch.tensor([1]))


def test_buffers_keep_their_addresses() -> None:
    builder = build_builder(pool := a_pool(max_context=96))
    slots = [pool.acquire() for _ in range(4)]
    for slot in slots:
        pool.reserve(slot, 96)
    seen: dict[str, set[int]] = {}
    for sizes in ({0: 60, 1: 60}, {2: 1}, {0: 2, 3: 1, 1: 0}, {3: 9, 2: 1}):
        batch = batch_of(sizes)
        builder.prepare(batch)
        builder.fill()
        for name, tensor in leaves(builder.metadata.shared).items():
            if tensor.numel():
                seen.setdefault(name, set()).add(tensor.data_ptr())
        for slot, num in sizes.items():
            pool.commit(slot, num)
    assert {name: len(places) for name, places in seen.items() if len(places) > 1} == {}


@both_pools
@pytest.mark.parametrize("layers", [[(SLIDING, 0)], [(CSA, 4), (HCA, 6)], [(HCA, 5), (CSA, 3)]])
def test_the_estimate_is_the_bytes_of_all_buffers(
    config_type: type[PoolConfig], layers: list[tuple[object, int]]
) -> None:
    model = small_model(layers)  # type: ignore[arg-type]
    for tokens, requests, budget in ((1, None, 1), (128, 2, 4096), (17, 3, 2**20)):
        config = BackendConfig(
            pool=pool_config(config_type, model, in_place_tokens=3),
            kernels="torch",
            max_batch_tokens=tokens,
            max_batch_requests=requests,
            score_budget_bytes=budget,
        )
        report = Backend.estimate(model, config)
        backend = Backend.from_config(model, config)
        pool_nbytes = {part.table: part.nbytes for part in backend.pool.components()}
        assert dict(report.components) == {**pool_nbytes, **backend.builder.nbytes()}


@pytest.mark.parametrize("max_context", [48, 96, 960])
def test_score_tiles_fit_the_budget_unless_one_row_does_not(max_context: int) -> None:
    model = small_model([(CSA, 4)], drafts=0)
    config = pool_config(UnifiedPoolConfig, model, max_requests=1, max_context=max_context)
    builder = build_builder(pool := build_pool(config, model, CPU))  # 512 bytes: 128 scores
    slot = pool.acquire()
    pool.reserve(slot, max_context)
    while pool.length(slot) < max_context:
        num = min(64, max_context - pool.length(slot))
        builder.prepare(batch_of({slot: num}))
        meta = builder.metadata.for_layer(0, builder.fill())
        inputs = meta.score_inputs
        assert inputs is not None
        # the scratch holds the budget or, if that is more, the longest row
        scratch = max(128, max_context // 4)
        assert inputs.tile_tokens == max(1, scratch // inputs.max_entries)
        tile_TN = meta.workspace.score_tile(inputs.tile_tokens, inputs.max_entries)
        assert tile_TN.shape == (inputs.tile_tokens, inputs.max_entries)
        pool.commit(slot, num)
        assert inputs.max_entries >= pool.length(slot) // 4


def test_a_shape_without_chunks_has_no_tail_and_no_fresh_rows() -> None:
    builder = build_builder(pool := a_pool())
    slot = pool.acquire()
    pool.reserve(slot, 24)
    for num, chunk in ((2, False), (3, True)):
        builder.prepare(batch_of({slot: num}))
        meta = builder.metadata.for_layer(0, builder.fill())
        assert (meta.tail_loc_T is not None) is chunk
        assert (meta.workspace.fresh_TD is not None) is chunk
        pool.commit(slot, num)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ForwardBatch(slots=[0], query_lengths=[], token_ids=[]), "1 slots but 0 query"),
        (lambda: ForwardBatch(slots=[0], query_lengths=[-1], token_ids=[]), "must be >= 0"),
        (lambda: ForwardBatch(slots=[0], query_lengths=[2], token_ids=[1]), "1 token_ids but"),
        (lambda: ForwardBatch(slots=[0, 0], query_lengths=[1, 1], token_ids=[1, 1]), "twice"),
        (
            lambda: ForwardBatch(slots=[0], query_lengths=[2], token_ids=[1, 1], num_tokens=1),
            "below the 2 tokens",
        ),
    ],
)
def test_a_malformed_batch_names_its_problem(call: Callable[[], object], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        call()


def test_a_padded_batch_keeps_its_requests_in_front() -> None:
    batch = ForwardBatch.of([(2, [5, 6]), (0, [])]).padded(num_tokens=5, num_requests=4)
    assert batch.slots == (2, 0, -1, -1)
    assert batch.query_lengths == (2, 0, 0, 0)
    assert batch.last_rows == (1, -1, -1, -1)
    assert batch.num_tokens == 5


def test_lengths_of_a_slot_move_only_through_its_own_batches() -> None:
    pool = a_pool()
    for length in (3, 8):
        slot = pool.acquire()
        pool.reserve(slot, 24)
        set_length(pool, slot, length)
    builder = build_builder(pool)
    # a padding request between the two, accepted counts of padding are ignored
    batch = ForwardBatch(slots=[1, -1, 0], query_lengths=[2, 1, 1], token_ids=[1, 2, 3, 4])
    builder.prepare(batch)
    builder.fill()
    builder.advance(torch.tensor([1, 9, 0], dtype=torch.int64))
    assert pool.lengths.tolist()[:2] == [3, 9]
