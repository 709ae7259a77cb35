"""Snapshots: exact between any two pools of one model and format, or refused (scenarios 10, 11, 14, 63, 64, 66)."""

import itertools
import math

import attrs
import pytest
import torch

from dsv4.config import LayerKind, ModelConfig
from dsv4.errors import SnapshotError
from dsv4.pool.base import Component, Region
from dsv4.pool.formats import PlainRows
from dsv4.pool.state import LastToken
from dsv4.pool.tables import TablePool
from dsv4.pool.three_pool import ThreePool
from dsv4.pool.unified import UnifiedPool
from tests.pool.sequences import (
    FAMILIES,
    check,
    check_streams,
    expected_fold,
    extend,
    feed,
    freeze,
    make_pool,
    slot_memory,
    small_model,
)

families = pytest.mark.parametrize("family", FAMILIES)
pairs = pytest.mark.parametrize(("source", "target"), list(itertools.product(FAMILIES, FAMILIES)))


def filled(pool: TablePool, length: int, *, first: int = 0) -> tuple[int, list[int]]:
    """A slot with `length` committed tokens that came in uneven pieces."""
    slot, tokens = pool.acquire(), []
    pool.reserve(slot, length)
    for cut in itertools.cycle((5, 1, 1, 11, 2)):
        new = range(first + len(tokens), first + min(length, len(tokens) + cut))
        if not len(new):
            return slot, tokens
        tokens = extend(pool, slot, tokens, new)
    raise AssertionError


def attached(pool: TablePool, snapshot, *, room: int = 30) -> int:
    slot = pool.acquire()
    pool.reserve(slot, snapshot.length + room)
    pool.attach(slot, snapshot)
    return slot


@pairs
@pytest.mark.parametrize(
    ("rows", "keys"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "fp4"), ("fp8", "fp8")]
)
def test_an_attached_slot_continues_like_its_source_in_pools_of_other_sizes(
    source: type[TablePool], target: type[TablePool], rows: str, keys: str
) -> None:
    formats = {"row_format": rows, "index_format": keys}
    first = make_pool(source, in_place_tokens=2, **formats)
    second = make_pool(
        target, in_place_tokens=5, page_tokens=48, max_requests=3, num_pages=7, **formats
    )
    for length in (1, 4, 17, 32, 50) if rows == "fp8" else (3, 15, 16, 31, 33):
        slot, tokens = filled(first, length)
        snapshot = first.export(slot)
        first.release(slot)
        # Somebody else's rows are in the way, then gone.
        second.release(filled(second, 60, first=5_000)[0])
        copy = attached(second, snapshot)
        check(second, copy, tokens)
        check_streams(second, copy, tokens)
        for cut in (1, 2, 5, 9, 1):
            tokens = extend(second, copy, tokens, range(len(tokens), len(tokens) + cut))
            check(second, copy, tokens)
        second.release(copy)


@pairs
def test_what_is_attached_exports_the_same_bytes_again(
    source: type[TablePool], target: type[TablePool]
) -> None:
    first, second = make_pool(source), make_pool(target, in_place_tokens=6, page_tokens=16)
    for length in (1, 7, 16, 30, 45):
        slot, _ = filled(first, length)
        snapshot = first.export(slot)
        again = second.export(attached(second, snapshot))
        assert again.tensors.keys() == snapshot.tensors.keys()
        for name, rows in snapshot.tensors.items():
            assert torch.equal(rows.view(torch.uint8), again.tensors[name].view(torch.uint8)), name
        first.release(slot)
        second.release(0)


@families
def test_a_snapshot_holds_the_rows_of_the_hand_table(family: type[TablePool]) -> None:
    pool = make_pool(family, in_place_tokens=4)
    table = {
        # length: window rows, CSA entries, CSA state rows, HCA entries, accumulator rows
        0: (0, 0, 0, 0, 0),
        1: (1, 0, 1, 0, 1),
        4: (4, 1, 4, 0, 1),
        7: (7, 1, 7, 0, 1),
        16: (16, 4, 4, 1, 0),
        43: (16, 10, 7, 2, 1),
    }
    for length, (window, entries, state, folded, accumulator) in table.items():
        slot, _ = filled(pool, length)
        rows = {name: tensor.shape[0] for name, tensor in pool.export(slot).tensors.items()}
        assert rows == {
            "layer0.window": window,
            "layer1.window": window,
            "layer1.entries": entries,
            "layer1.index": entries,
            "layer1.state": state,
            "layer1.index_state": state,
            "layer2.window": window,
            "layer2.entries": folded,
            "layer2.accumulator": accumulator,
            "layer3.window": window,
            "last_streams": min(length, 1),
        }
        pool.release(slot)


@families
@pytest.mark.parametrize("margin", [1, 2, 4, 5, 6, 8, 12, 20])
def test_an_exported_accumulator_is_the_fold_of_the_open_window(
    family: type[TablePool], margin: int
) -> None:
    pool = make_pool(family, in_place_tokens=margin)
    slot, tokens = pool.acquire(), []
    pool.reserve(slot, 60)
    for cut in (1, 1, 9, 4, 1, 1, 17, 1, 1, 1, 1, 12, 1):
        tokens = extend(pool, slot, tokens, range(len(tokens), len(tokens) + cut))
        state = pool.export(slot).tensors["layer2.accumulator"]
        if len(tokens) % 16:
            assert torch.equal(state[0], expected_fold(pool, 2, tokens))
        else:
            assert state.shape == (0, 3 * 24)


@families
def test_an_attached_accumulator_carries_the_length_as_its_count(family: type[TablePool]) -> None:
    pool = make_pool(family)
    for length in (16, 21):
        slot, tokens = filled(pool, length)
        copy = attached(pool, pool.export(slot))
        row = pool.view(2, Region.ACCUMULATOR).storage[copy]
        assert row[-1] == length
        if length == 21:
            assert torch.equal(row[:-1], expected_fold(pool, 2, tokens))
        else:
            assert row[:24].eq(-math.inf).all()
            assert row[24:-1].eq(0).all()


@families
@pytest.mark.parametrize("margin", [1, 2, 4, 5, 6, 8, 12])
def test_provisional_writes_beyond_the_length_do_not_reach_a_snapshot(
    family: type[TablePool], margin: int
) -> None:
    pool = make_pool(family, in_place_tokens=margin)
    other = make_pool(family, in_place_tokens=1)
    for length in range(14, 36):
        slot, tokens = pool.acquire(), []
        pool.reserve(slot, length + margin)
        for cut in (length - length // 3, length // 3):
            tokens = extend(pool, slot, tokens, range(len(tokens), len(tokens) + cut))
        feed(pool, slot, tokens, range(900, 900 + margin))
        copy = attached(other, pool.export(slot))
        check(other, copy, tokens, provisional=True)
        tokens = extend(other, copy, tokens, range(20))
        check(other, copy, tokens)
        other.release(copy)
        pool.release(slot)


@families
@pytest.mark.parametrize("margin", [1, 4, 12])
def test_a_snapshot_after_a_rollback_is_that_of_the_shorter_sequence(
    family: type[TablePool], margin: int
) -> None:
    pool, other = make_pool(family, in_place_tokens=margin), make_pool(family)
    for length in (15, 16, 17, 18, 33):
        slot, tokens = filled(pool, length)
        pool.reserve(slot, length + margin)
        extend(pool, slot, tokens, range(700, 700 + margin))
        pool.rollback(slot, length)
        copy = attached(other, pool.export(slot))
        check(other, copy, tokens, provisional=True)
        pool.release(slot)
        other.release(copy)


@families
@pytest.mark.parametrize("length", [127, 128, 129, 130, 255, 256, 257, 383, 384, 385])
def test_a_restored_sequence_continues_exactly_around_the_released_ratio(
    family: type[TablePool], length: int
) -> None:
    model = small_model((4, 128), window=128, drafts=0)
    pool = make_pool(family, model, max_context=512, page_tokens=128, max_requests=2)
    slot, tokens = pool.acquire(), []
    pool.reserve(slot, 512)
    tokens = extend(pool, slot, tokens, range(length - 3))
    tokens = extend(pool, slot, tokens, [1, 2, 3])
    copy = attached(pool, pool.export(slot), room=0)
    pool.reserve(copy, 512)
    for cut in (1, 2, 3):
        new = range(cut)
        extend(pool, slot, tokens, new)
        tokens = extend(pool, copy, tokens, new)
        check(pool, slot, tokens)
        check(pool, copy, tokens)


@families
def test_restoring_one_slot_moves_no_byte_of_another(family: type[TablePool]) -> None:
    pool = make_pool(family, row_format="fp8", index_format="fp4")
    slots = [filled(pool, length)[0] for length in (40, 37, 21)]
    snapshot = pool.export(slots[1])
    pool.release(slots[1])
    before = [slot_memory(pool, slots[0]), slot_memory(pool, slots[2])]
    assert attached(pool, snapshot) == slots[1]
    assert [slot_memory(pool, slots[0]), slot_memory(pool, slots[2])] == before


@families
def test_a_snapshot_is_a_copy(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot, tokens = filled(pool, 20)
    snapshot = pool.export(slot)
    for tensor in pool.tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
    check(pool, attached(pool, snapshot), tokens)
    assert snapshot.nbytes == sum(t.numel() * t.element_size() for t in snapshot.tensors.values())


def with_layer(model: ModelConfig, index: int, **changes: object) -> ModelConfig:
    layers = list(model.layers)
    layers[index] = attrs.evolve(layers[index], **changes)
    return attrs.evolve(model, layers=tuple(layers))


MODEL = small_model()
MISFITS = {
    "another ratio": ({}, with_layer(MODEL, 2, ratio=32)),
    "another kind": ({}, with_layer(MODEL, 2, kind=LayerKind.CSA, index_topk=4)),
    "no draft layer": ({}, MODEL.without_drafts()),
    "another window": ({}, attrs.evolve(MODEL, sliding_window=8)),
    "another width": ({}, attrs.evolve(MODEL, head_dim=32)),
    "other key width": ({}, attrs.evolve(MODEL, index_head_dim=64)),
    "other streams": ({}, attrs.evolve(MODEL, hc_mult=4)),
    "other rounding": ({}, attrs.evolve(MODEL, kv_quant="none")),
    "another row format": ({"row_format": "bf16"}, MODEL),
    "another key format": ({"index_format": "bf16"}, MODEL),
}


@families
@pytest.mark.parametrize("difference", MISFITS)
def test_a_snapshot_of_another_model_or_format_is_refused(
    family: type[TablePool], difference: str
) -> None:
    slot, _ = filled(make := make_pool(family, MODEL), 20)
    snapshot = make.export(slot)
    sizes, model = MISFITS[difference]
    pool = make_pool(family, model, **sizes)
    target = pool.acquire()
    pool.reserve(target, 20)
    before = freeze(pool)
    with pytest.raises(SnapshotError, match=r"does not fit this pool: .* the pool has"):
        pool.attach(target, snapshot)
    assert freeze(pool) == before


@families
def test_a_snapshot_with_missing_short_or_surplus_rows_is_refused(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot, _ = filled(pool, 20)
    good = pool.export(slot)
    target = pool.acquire()
    pool.reserve(target, 20)
    window = good.tensors["layer0.window"]
    missing = {name: rows for name, rows in good.tensors.items() if name != "layer0.window"}
    for tensors, message in (
        (missing, "layer0.window has no rows, needs 16"),
        (good.tensors | {"layer0.window": window[1:]}, "layer0.window has 15 rows, needs 16"),
        (good.tensors | {"layer9.window": window}, "layer9.window has 16 rows, needs none"),
    ):
        before = freeze(pool)
        with pytest.raises(SnapshotError, match=message):
            pool.attach(target, attrs.evolve(good, tensors=tensors))
        assert freeze(pool) == before


@families
def test_a_dropped_snapshot_is_empty_and_used_up(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot, _ = filled(pool, 20)
    snapshot = pool.export(slot)
    copy = attached(pool, snapshot)
    pool.drop(snapshot)
    assert snapshot.nbytes == 0
    with pytest.raises(SnapshotError, match="dropped already"):
        pool.drop(snapshot)
    pool.release(copy)
    fresh = pool.acquire()
    pool.reserve(fresh, 20)
    with pytest.raises(SnapshotError, match="was dropped; export the sequence again"):
        pool.attach(fresh, snapshot)


def extra_component(pool: TablePool) -> Component:
    storage = torch.full((pool.geometry.max_requests, 5), math.nan)
    return Component(
        name="extra",
        table="extra",
        layer=None,
        storage=storage,
        format=PlainRows(torch.float32, 5),
        rows_per_slot=1,
    )


@families
def test_a_component_that_nothing_exports_stops_the_export(family: type[TablePool]) -> None:
    class Extended(family):  # type: ignore[valid-type,misc]
        def components(self) -> tuple[Component, ...]:
            return (*super().components(), extra_component(self))

    plain = make_pool(family)
    pool = Extended(plain.config, plain.model)
    slot, _ = filled(pool, 5)
    with pytest.raises(SnapshotError, match="components extra: no part exports them"):
        pool.export(slot)


@families
def test_a_registered_component_travels_with_its_sequence(family: type[TablePool]) -> None:
    pool = make_pool(family)
    extra = extra_component(pool)
    pool.register(LastToken(extra, pool.geometry))
    slot, _ = filled(pool, 5)
    extra.storage[slot] = 7
    copy, fork = attached(pool, pool.export(slot)), pool.fork(slot)
    assert extra.storage[copy].eq(7).all()
    assert extra.storage[fork].eq(7).all()


@families
def test_every_component_of_the_registry_is_exported(family: type[TablePool]) -> None:
    pool = make_pool(family)
    slot, _ = filled(pool, 43)
    exported = set(pool.export(slot).tensors)
    names = {component.name for component in pool.components()}
    # The snapshot's own length, the receiver's own pages, and raw rows that the accumulator has taken in.
    assert names - exported == {"lengths", "block_table", "layer2.state"}


def test_families_are_told_apart_by_nothing_in_a_snapshot() -> None:
    snapshots = []
    for family in (UnifiedPool, ThreePool):
        pool = make_pool(family)
        slot, _ = filled(pool, 43)
        snapshots.append(pool.export(slot))
    first, second = snapshots
    assert (first.length, first.signature) == (second.length, second.signature)
    for name, rows in first.tensors.items():
        assert torch.equal(rows, second.tensors[name]), name
