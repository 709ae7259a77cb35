"""Conformance of a MetadataBuilder: one test per promise of `dsv4.metadata.base.MetadataBuilder`, in its words."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import attrs
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from dsv4.errors import Dsv4Error, StaleMetadataError
from dsv4.metadata.base import MetadataBuilder
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.forward import SharedTensors
from dsv4.metadata.plans import FoldPlan, IndexStream, OverlapPlan, RopeTable
from dsv4.pool.base import KVPool
from dsv4.testing.compare import differences
from dsv4.testing.expected import ExpectedForward
from dsv4.testing.memory import differing, pool_bytes, tensor_bytes
from dsv4.testing.models import CSA, HCA, SLIDING, backend_config, small_model
from dsv4.testing.player import Player
from dsv4.testing.pool_setup import MakePlayer, PoolSetup, refused, some_ids


def leaves(value: object, name: str = "") -> dict[str, Tensor]:
    """Every tensor of a forward's shared metadata, by path."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        pairs = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, SharedTensors | IndexStream | OverlapPlan | FoldPlan | RopeTable):
        pairs = [
            (f.name, getattr(value, f.name))
            for f in attrs.fields(type(value))
            if f.name != "derived"
        ]
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, part in pairs:
        found |= leaves(part, f"{name}.{key}")
    return found


def play_lengths(player: Player, lengths: Mapping[int, int]) -> None:
    """Give slots these committed lengths; only the books move, no row is written."""
    for slot, length in lengths.items():
        while player.pool.length(slot) < length:
            step = min(length - player.pool.length(slot), 64)
            player.pool.begin_forward([slot], [step])
            player.pool.commit(slot, step)


def batch_of(sizes: Mapping[int, int], *, padding: int = 0, requests: int = 0) -> ForwardBatch:
    """A batch of some ids by slot and number of tokens; keys below 0 are padding requests of that many tokens."""
    pairs = [(max(slot, -1), some_ids(num, seed=slot)) for slot, num in sizes.items()]
    batch = ForwardBatch.of(pairs)
    return batch.padded(num_tokens=batch.num_tokens + padding, num_requests=requests)


class MetadataBuilderConformance(PoolSetup):
    """Subclass, give the fixture `pool_config_type`; the pool's own builder is tested.

    class TestMyBuilder(MetadataBuilderConformance):
        @pytest.fixture
        def pool_config_type(self):
            return MyPoolConfig
    """

    @pytest.fixture
    def player(self, make: MakePlayer) -> Player:
        """Four slots at lengths 0, 9, 30 and 61 of a pool with D = 3."""
        player = make(in_place_tokens=3)
        slots = [player.start(96) for _ in range(4)]
        play_lengths(player, dict(zip(slots, (0, 9, 30, 61), strict=True)))
        return player

    def test_1_prepare_copies_host_values_into_static_input_buffers(self, player: Player) -> None:
        """1. `prepare` copies host values into static input buffers: the caller's lists may change afterwards, and the
        buffers stay where they are."""
        builder = player.builder
        addresses: set[tuple[int, ...]] = set()
        for sizes in ({1: 2, 2: 1}, {3: 5, 0: 1}, {0: 7}):
            builder.prepare(batch_of(sizes))
            epoch = builder.fill()
            shared = builder.metadata.shared
            assert shared.token_ids_T.tolist() == [
                i for slot, num in sizes.items() for i in some_ids(num, seed=slot)
            ]
            assert builder.metadata.for_layer(0, epoch).positions_T is shared.positions_T
            addresses.add((shared.token_ids_T.data_ptr(), shared.swa_loc_T.data_ptr()))
        assert len(addresses) == 1

    def test_1_a_failing_prepare_changes_nothing(self, player: Player) -> None:
        """1. A failing prepare changes nothing: neither the pool nor what fill makes of the batch before."""
        builder, pool = player.builder, player.pool
        builder.prepare(batch_of({1: 2, 2: 5}))
        builder.fill()
        before = _copies(builder.metadata.shared)
        long = pool.config.max_context
        for batch in (
            batch_of({0: 129}),  # more tokens than the builder holds
            batch_of({1: 1}, padding=200),
            batch_of({-1: 1, 0: 1, 1: 1, 2: 1, 3: 1}),  # more requests
            ForwardBatch(slots=[0], query_lengths=[1], token_ids=[97]),  # outside the vocabulary
            ForwardBatch(slots=[0], query_lengths=[1], token_ids=[-1]),
            batch_of({4: 1}),  # no such slot
            batch_of({1: 1, 0: long + 1}),  # beyond what is reserved
        ):
            with refused(pool, Dsv4Error, slots=[0, 1, 2, 3]):
                builder.prepare(batch)
            builder.fill()
            assert not _differing(before, builder.metadata.shared)
        pool.release(0)
        with refused(pool, Dsv4Error, slots=[1, 2, 3]):
            builder.prepare(batch_of({1: 1, 0: 1}))

    @pytest.mark.parametrize("seed", range(4))
    def test_2_fill_computes_everything_from_the_lengths_of_this_moment(
        self, make: MakePlayer, seed: int
    ) -> None:
        """2. `fill` computes everything else on the device from the lengths of this moment."""
        source = random.Random(seed)
        margin = source.choice([1, 2, 5, 12])
        model = small_model(window=source.choice([1, 7, 40]), topk=source.choice([1, 3, 30]))
        player = make(model, in_place_tokens=margin, page_tokens=source.choice([12, 36]))
        slots = [player.start(96) for _ in range(4)]
        play_lengths(player, {slot: source.randrange(70) for slot in slots})
        for _ in range(5):
            source.shuffle(slots)
            chosen = slots[: source.randrange(1, 5)]
            sizes = {s: source.choice([0, 1, margin, margin + 1, 19]) for s in chosen}
            if len(sizes) < 4:
                sizes[-1] = source.randrange(3)
            batch = batch_of(sizes, padding=source.choice([0, 1, 6]))
            _check(player.builder, player.pool, batch)
            for slot, num in sizes.items():
                if slot >= 0:
                    player.pool.commit(slot, num // 2 if num <= margin else num)

    def test_2_fill_has_no_effect_on_the_pool_and_is_idempotent(self, player: Player) -> None:
        """2. Filling again gives equal tensors at the same addresses under a new epoch, without effect on the pool."""
        builder, pool = player.builder, player.pool
        builder.prepare(batch_of({2: 1, 0: 9, 3: 3}, padding=2))
        before, version = pool_bytes(pool), pool.version
        first = builder.fill()
        copies, addresses = _copies(builder.metadata.shared), _addresses(builder.metadata.shared)
        second = builder.fill()
        assert second != first
        assert builder.metadata.epoch == second
        assert not _differing(copies, builder.metadata.shared)
        assert _addresses(builder.metadata.shared) == addresses
        assert not differing(before, pool_bytes(pool))
        assert pool.version == version

    def test_3_every_shared_tensor_is_computed_exactly_once_per_fill(
        self, make: MakePlayer
    ) -> None:
        """3. Every shared tensor is computed exactly once per fill, for any number of layers."""
        names: list[set[str]] = []
        for times in (1, 5):
            model = small_model([(SLIDING, 0), (CSA, 4), (HCA, 6)] * times)
            player = make(model, in_place_tokens=2, num_pages=4)
            slot = player.start(12)
            for num in (1, 9, 2):
                player.builder.prepare(batch_of({slot: num}))
                epoch = player.builder.fill()
                for layer in range(len(model.layers)):
                    player.builder.metadata.for_layer(layer, epoch)
                player.pool.commit(slot, num)
                counts: Counter[str] = player.builder.computed
                assert set(counts.values()) == {1}, counts
                assert "swa_loc" in counts
            names.append(set(counts))
        assert names[0] == names[1]

    def test_4_every_buffer_is_allocated_at_construction_as_estimated(self, player: Player) -> None:
        """4. Buffers are of the largest shape from the start: `nbytes` is what `estimate` says, and does not grow."""
        builder, pool = player.builder, player.pool
        config = backend_config(pool.config)
        estimated = dict(type(builder).estimate(pool.model, pool.geometry, config))
        assert dict(builder.nbytes()) == estimated
        builder.prepare(batch_of({3: 30, 1: 40}, padding=58))
        builder.fill()
        assert dict(builder.nbytes()) == estimated

    def test_4_shapes_depend_on_the_batch_shape_alone(self, player: Player) -> None:
        """4. Shapes depend on the BatchShape alone: equal shapes of other slots give equal shapes of tensors; buffers
        are prefixes of the largest shape's."""
        builder = player.builder
        play_lengths(player, {0: 9})  # as slot 1
        builder.prepare(batch_of({3: 30, 2: 40}, padding=58))
        builder.fill()
        largest = _addresses(builder.metadata.shared)
        shapes = []
        for sizes in ({1: 2, 0: 3}, {0: 2, 1: 3}):
            builder.prepare(batch_of(sizes))
            builder.fill()
            shared = builder.metadata.shared
            shapes.append((shared.shape, {n: tuple(t.shape) for n, t in leaves(shared).items()}))
            assert all(largest[name] == a for name, a in _addresses(shared).items())
        assert shapes[0] == shapes[1]

    def test_5_metadata_of_an_earlier_epoch_raises_on_access(self, player: Player) -> None:
        """5. Metadata of an earlier epoch raises StaleMetadataError on access."""
        builder = player.builder
        with pytest.raises(StaleMetadataError):
            _ = builder.metadata.shared
        with pytest.raises(StaleMetadataError):
            builder.metadata.for_layer(0, builder.metadata.epoch)
        builder.prepare(batch_of({1: 1}))
        old = builder.fill()
        kept = builder.metadata.for_layer(1, old)
        assert kept.store_loc_T.shape == (1,)
        builder.fill()
        with pytest.raises(StaleMetadataError):
            builder.metadata.for_layer(1, old)
        names = [n for n in dir(type(kept)) if isinstance(getattr(type(kept), n), property)]
        assert {"positions_T", "store_loc_T", "tail_loc_T", "sources", "state_plan"} <= set(names)
        for name in names:
            with pytest.raises(StaleMetadataError):
                getattr(kept, name)

    def test_6_swa_loc_for_is_exact_for_any_batch(self, player: Player) -> None:
        """6. `swa_loc_for` is exact for any batch: the stored tensor if batch and positions are the filled ones,
        otherwise a recompute from live positions, logged with its reason."""
        builder, pool = player.builder, player.pool
        filled = batch_of({1: 2, 3: 1})
        builder.prepare(filled)
        builder.fill()
        with capture_logs() as logs:
            stored = builder.swa_loc_for(batch_of({1: 2, 3: 1}))
        assert stored.data_ptr() == builder.metadata.swa_loc_T.data_ptr()
        assert not logs
        for batch, reason in (
            (batch_of({1: 2, 3: 1}, padding=3), "re-padded"),
            (batch_of({1: 2, 3: 1}, requests=4), "re-padded"),
            (batch_of({2: 2, 0: 1}), "other slots"),  # equal shape
            (batch_of({3: 1, 1: 2}), "other slots"),  # another order
            (batch_of({1: 1, 3: 2}), "other positions"),
            (batch_of({0: 40}), "other slots"),  # a prefill
            (batch_of({1: 0, 3: 0}, padding=2), "idle"),
        ):
            with capture_logs() as logs:
                loc_T = builder.swa_loc_for(batch)
            assert loc_T.tolist() == ExpectedForward.on(pool, batch).swa_loc(), reason
            assert [(log["event"], log["reason"]) for log in logs] == [
                ("swa_loc_recomputed", reason)
            ]
        pool.commit(1, 2)
        with capture_logs() as logs:
            loc_T = builder.swa_loc_for(filled)
        assert loc_T.tolist() == ExpectedForward.on(pool, filled).swa_loc()
        assert [log["reason"] for log in logs] == ["other positions"]
        assert builder.swa_loc_for(None).tolist() == []

    def test_7_padding_has_slot_minus_1_no_rows_and_no_visible_entries(
        self, player: Player
    ) -> None:
        """7. Padding tokens and requests have slot -1, no rows, no visible entries."""
        builder = player.builder
        batch = batch_of({3: 2, -1: 3, 1: 4}, padding=5)
        builder.prepare(batch)
        builder.fill()
        shared = builder.metadata.shared
        nobody = [2, 3, 4, *range(9, 14)]
        assert shared.slot_T[nobody].tolist() == [-1] * 8
        locs = [shared.swa_loc_T, shared.store_loc_T, shared.tail_loc_T]
        locs += [plan.state_loc_T for plan in shared.state_plans.values()]
        for loc_T in locs:
            assert loc_T is not None
            assert loc_T[nobody].tolist() == [-1] * 8
        for stream in (shared.window_stream, *shared.entry_streams.values()):
            assert stream.indptr_T1.diff()[nobody].tolist() == [0] * 8
        for visible_T in shared.num_visible.values():
            assert visible_T[nobody].tolist() == [0] * 8

    def test_8_advance_adds_accepted_tokens_and_a_later_host_commit_changes_nothing_more(
        self, player: Player
    ) -> None:
        """8. `advance` adds accepted tokens to the lengths on the device; a later host commit of the same tokens
        changes nothing more."""
        builder, pool = player.builder, player.pool
        batch = ForwardBatch(slots=[2, -1, 1], query_lengths=[3, 0, 1], token_ids=[1, 2, 3, 4])
        builder.prepare(batch)
        builder.fill()
        builder.advance(torch.tensor([2, 7, 1], dtype=torch.int32, device=pool.device))
        assert pool.lengths.tolist() == [0, 10, 32, 61]
        following = batch_of({1: 1, 2: 1})
        _check(builder, pool, following)
        assert pool.lengths.tolist() == [0, 10, 32, 61]
        pool.commit(2, 2)
        pool.commit(1, 1)
        assert pool.lengths.tolist() == [0, 10, 32, 61]
        assert [pool.length(slot) for slot in (1, 2)] == [10, 32]
        _check(builder, pool, following)


def _check(builder: MetadataBuilder, pool: KVPool, batch: ForwardBatch) -> None:
    builder.prepare(batch)
    builder.fill()
    wrong = differences(builder.metadata.shared, ExpectedForward.on(pool, batch))
    assert not wrong, f"{', '.join(wrong)} of {batch} at lengths {pool.lengths.tolist()}"


def _copies(shared: SharedTensors) -> dict[str, Tensor]:
    """Bytes of every tensor that is final after fill: select writes the CSA indices, layer by layer."""
    open_ended = {
        id(stream.indices_N) for (_, topk), stream in shared.entry_streams.items() if topk
    }
    return {n: tensor_bytes(t) for n, t in leaves(shared).items() if id(t) not in open_ended}


def _differing(before: Mapping[str, Tensor], shared: SharedTensors) -> list[str]:
    now = _copies(shared)
    assert now.keys() == before.keys()
    return [name for name in now if not torch.equal(now[name], before[name])]


def _addresses(shared: SharedTensors) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in leaves(shared).items() if tensor.numel()}
