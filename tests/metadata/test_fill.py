"""Every tensor of a forward's metadata equals what plain loops over its tokens give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import ThreePoolConfig, UnifiedPoolConfig
from dsv4.metadata.plans import FoldPlan, OverlapPlan
from dsv4.testing.builder import leaves
from dsv4.testing.compare import differences
from dsv4.testing.expected import ExpectedForward
from dsv4.testing.memory import differing, pool_bytes, tensor_bytes
from dsv4.testing.models import CSA, HCA, pool_config, small_model
from dsv4.testing.player import build_builder, build_pool
from tests.metadata.forwards import MAX_TOKENS, Drawn, batch_of, drawn, set_length


@given(drawn=drawn())
@settings(max_examples=120)
def test_every_tensor_is_what_plain_loops_give(drawn: Drawn) -> None:
    pool, batch = drawn.pool(), drawn.batch()
    builder = build_builder(pool, max_batch_tokens=5 * MAX_TOKENS)
    before = pool_bytes(pool)
    builder.prepare(batch)
    builder.fill()
    assert differences(builder.metadata.shared, ExpectedForward.on(pool, batch)) == []
    assert set(builder.computed.values()) == {1}
    assert differing(before, pool_bytes(pool)) == []


@given(drawn=drawn(), accepted=st.lists(st.integers(0, 12), min_size=5, max_size=5))
@settings(max_examples=40)
def test_advance_then_fill_is_commit_then_fill(drawn: Drawn, accepted: list[int]) -> None:
    """The device moves lengths ahead of the host: the next forward's metadata is the same either way."""
    pool, batch = drawn.pool(), drawn.batch()
    pairs = zip(batch.slots, batch.query_lengths, accepted, strict=False)
    taken = [min(a, n) if n <= drawn.config.in_place_tokens else n for _, n, a in pairs]
    builder = build_builder(pool, max_batch_tokens=5 * MAX_TOKENS)
    builder.prepare(batch)
    builder.fill()
    builder.advance(torch.tensor(taken, dtype=torch.int32))
    following = batch_of({slot: 1 for slot in batch.slots if slot >= 0}, 2)
    ahead = pool.lengths.tolist()
    try:
        builder.prepare(following)
    except ValueError:
        # the host does not know what was accepted: a chunk's tokens might all have been rejected
        assert max(batch.query_lengths) > drawn.config.in_place_tokens
        return
    builder.fill()
    assert differences(builder.metadata.shared, ExpectedForward.on(pool, following)) == []
    for slot, num in zip(batch.slots, taken, strict=True):
        if slot >= 0:
            pool.commit(slot, num)
    assert pool.lengths.tolist() == ahead
    assert differences(builder.metadata.shared, ExpectedForward.on(pool, following)) == []


@given(drawn=drawn())
@settings(max_examples=30)
def test_filling_again_gives_the_same_tensors_in_the_same_places(drawn: Drawn) -> None:
    pool, batch = drawn.pool(), drawn.batch()
    builder = build_builder(pool, max_batch_tokens=5 * MAX_TOKENS)
    builder.prepare(batch)
    seen = []
    for _ in range(2):
        builder.fill()
        parts = {
            name: (tensor.data_ptr(), tensor_bytes(tensor))
            for name, tensor in leaves(builder.metadata.shared).items()
        }
        seen.append(parts)
    for name, (address, memory) in seen[0].items():
        assert seen[1][name][0] == address, name
        assert torch.equal(seen[1][name][1], memory), name


@pytest.mark.parametrize("config_type", [UnifiedPoolConfig, ThreePoolConfig])
def test_a_forward_worked_out_by_hand(config_type: type[UnifiedPoolConfig]) -> None:
    """Window 3, D = 2 (rings of 4 rows), ratios 2 (CSA, K = 2) and 3 (HCA), pages of 6 tokens, three slots.

    Slot 0 has 5 tokens and decodes one; slot 2 has 1 token and gets a chunk of four; slot 1 is idle.
    """
    model = small_model([(CSA, 2), (HCA, 3)], window=3, topk=2, drafts=0)
    config = pool_config(
        config_type, model, max_requests=3, max_context=12, page_tokens=6, in_place_tokens=2
    )
    pool = build_pool(config, model, torch.device("cpu"))
    for length in (5, 2, 1):
        slot = pool.acquire()
        pool.reserve(slot, 12 if slot == 0 else 6)  # slot 0: pages 0 and 1, slot 1: 2, slot 2: 3
        set_length(pool, slot, length)
    builder = build_builder(pool)
    builder.prepare(batch_of({0: 1, 1: 0, 2: 4}, padding=1))
    epoch = builder.fill()
    shared = builder.metadata.shared
    assert shared.request_T.tolist() == [0, 2, 2, 2, 2, 3]
    assert shared.slot_T.tolist() == [0, 2, 2, 2, 2, -1]
    assert shared.positions_T.tolist() == [5, 1, 2, 3, 4, 0]
    # slot 0, position 5 -> row 1; slot 2, positions 1..4 -> rows 9, 10, 11, 8
    assert shared.swa_loc_T.tolist() == [1, 9, 10, 11, 8, -1]
    assert shared.store_loc_T.tolist() == [1, -1, -1, -1, -1, -1]
    assert shared.tail_loc_T is not None
    assert shared.tail_loc_T.tolist() == [-1, 9, 10, 11, 8, -1]
    # 12 ring rows, then fresh rows; slot 2's position 0 is row 8 of the ring
    assert shared.window_stream.indptr_T1.tolist() == [0, 3, 5, 8, 11, 14, 14]
    assert shared.window_stream.indices_N.tolist()[:14] == [
        3, 0, 1,  8, 13,  8, 13, 14,  13, 14, 15,  14, 15, 16
    ]  # fmt: skip
    assert shared.num_visible[2].tolist() == [3, 1, 1, 2, 2, 0]
    assert shared.num_visible[3].tolist() == [2, 0, 1, 1, 1, 0]
    base = 12 if config_type is UnifiedPoolConfig else 0
    assert shared.entry_streams[2, 2].indptr_T1.tolist() == [0, 2, 3, 4, 6, 8, 8]
    # pages of 2 HCA entries: slot 0 reads entries 0 and 1 of page 0, slot 2 entry 0 of page 3
    assert shared.entry_streams[3, 0].indices_N.tolist()[:5] == [
        base + row for row in (0, 1, 6, 6, 6)
    ]
    # CSA windows that close: slot 0's third (row 2), slot 2's first two (page 3: rows 9, 10)
    assert shared.entry_locs[2].tolist()[:3] == [base + 2, base + 9, base + 10]
    assert shared.index_locs[2].tolist()[:3] == [2, 9, 10]
    overlap, fold = shared.state_plans[CSA, 2], shared.state_plans[HCA, 3]
    assert isinstance(overlap, OverlapPlan)
    assert isinstance(fold, FoldPlan)
    # state rings of 5 rows; own tokens of the forward are rows 15 + token
    assert overlap.source_EM.tolist()[:3] == [
        [2, 3, 4, 15],  # slot 0: positions 2, 3, 4 from the ring, 5 is token 0
        [-1, -1, 10, 16],  # slot 2: nothing before position 0
        [10, 16, 17, 18],
    ]
    assert overlap.state_loc_T.tolist() == [0, 11, 12, 13, 14, -1]
    # HCA: windows 1 of slot 0 (positions 3..5) and 0 of slot 2 (0..2); then the accumulators, which fold up to
    # position 3 (6 - 2), 0 (2 - 2) and 2 (5 - 2) of their sequences; raw rows are 2 per slot, own tokens 6 + token
    lanes = [[row for row in one if row >= 0] for one in fold.source_SJ.tolist()]
    assert lanes[:2] == [[1, 0, 6], [4, 7, 8]]
    assert lanes[-3:] == [[1], [], []]
    assert fold.folded_B.tolist() == [4, 0, 3]
    assert fold.start_S.tolist()[-3:] == [3, 0, 3]
    assert fold.accumulator_loc_B.tolist() == [0, -1, 2]
    assert shared.last_row_B.tolist() == [0, -1, 4]
    # six pages of two entries, behind the rings or in a table of their own
    assert builder.metadata.for_layer(1, epoch).sources[1].view.num_rows == base + 12


def test_a_forward_of_nothing_has_empty_tensors() -> None:
    model = small_model()
    pool = build_pool(pool_config(UnifiedPoolConfig, model), model, torch.device("cpu"))
    builder = build_builder(pool)
    slot = pool.acquire()
    for batch in (batch_of({}), batch_of({slot: 0}), batch_of({-1: 0}, padding=2)):
        builder.prepare(batch)
        builder.fill()
        assert differences(builder.metadata.shared, ExpectedForward.on(pool, batch)) == []
