"""What a pool must give back, told by brute force: sequences of token ids whose rows are written as a forward would
write them, and read back one by one against values that follow from the ids alone."""

# D row values, C channels of a head

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from dsv4.config import (
    LayerKind,
    ModelConfig,
    PoolConfig,
    ThreePoolConfig,
    UnifiedPoolConfig,
    YarnConfig,
)
from dsv4.config.layers import layer_table
from dsv4.pool.base import Region
from dsv4.pool.tables import TablePool
from dsv4.pool.three_pool import ThreePool
from dsv4.pool.unified import UnifiedPool

FAMILIES = (UnifiedPool, ThreePool)
CONFIGS: dict[type[TablePool], type[PoolConfig]] = {
    UnifiedPool: UnifiedPoolConfig,
    ThreePool: ThreePoolConfig,
}
YARN = YarnConfig(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64)


def small_model(
    ratios: Sequence[int] = (0, 4, 16), *, csa: int = 4, window: int = 16, drafts: int = 1
) -> ModelConfig:
    """Sliding layers for ratio 0, CSA layers for ratio `csa`, HCA layers for any other, and sliding draft layers."""

    def kind(ratio: int) -> LayerKind:
        if ratio == 0:
            return LayerKind.SLIDING
        return LayerKind.CSA if ratio == csa else LayerKind.HCA

    every = [*ratios, *[0] * drafts]
    layers = layer_table(
        [kind(ratio) for ratio in every],
        every,
        hash_routing=[False] * len(ratios),
        num_drafts=drafts,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        yarn=YARN,
        index_topk=8,
    )
    return attrs.evolve(
        ModelConfig.preset("tiny"),
        hidden_size=8,
        hc_mult=2,
        head_dim=24,
        qk_rope_head_dim=8,
        index_head_dim=32,
        sliding_window=window,
        num_hidden_layers=len(ratios),
        num_nextn_predict_layers=drafts,
        layers=layers,
    )


def make_pool(
    family: type[TablePool], model: ModelConfig | None = None, **sizes: object
) -> TablePool:
    """A pool whose memory was poisoned before it was adopted: NaN, 0x7F and 2^31 - 1 wherever nothing is written."""
    defaults: dict[str, object] = {"max_requests": 4, "max_context": 96, "page_tokens": 32}
    config = CONFIGS[family](**(defaults | sizes))  # type: ignore[arg-type]
    model = model or small_model()
    return family(config, model, storage=poisoned_storage(family, config, model))


def poisoned_storage(
    family: type[TablePool], config: PoolConfig, model: ModelConfig
) -> dict[str, Tensor]:
    fillers = {torch.uint8: 0x7F, torch.int32: 2**31 - 1}
    return {
        name: torch.full(table.shape, fillers.get(table.dtype, math.nan), dtype=table.dtype)
        for name, table in family.storage_tables(config, model).items()
    }


@functools.lru_cache(maxsize=100_000)
def value(what: str, layer: int, dim: int, ids: tuple[int, ...]) -> Tensor:
    """The row that these token ids have in this place: any fixed function of its arguments."""
    seed = zlib.crc32(repr((what, layer, ids)).encode())
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def feed(pool: TablePool, slot: int, tokens: Sequence[int], new: Sequence[int]) -> list[int]:
    """One forward of `new` tokens after the committed `tokens`: every write that a forward makes. No commit."""
    length, total = len(tokens), len(tokens) + len(new)
    assert pool.length(slot) == length
    pool.begin_forward([slot], [len(new)])
    ids = [*tokens, *new]
    for index, layer in enumerate(pool.model.layers):
        first = max(length, total - pool.geometry.ring_rows)
        _put(pool, index, Region.WINDOW, slot, ids, range(first, total))
        if layer.ratio:
            entries = range(length // layer.ratio, total // layer.ratio)
            _put(pool, index, Region.ENTRIES, slot, ids, entries)
        if layer.kind is LayerKind.CSA:
            _put(pool, index, Region.INDEX, slot, ids, entries)
            first = max(length, total - pool.geometry.overlap_rows(layer.ratio))
            for region in (Region.STATE, Region.INDEX_STATE):
                _put(pool, index, region, slot, ids, range(first, total))
        elif layer.kind is LayerKind.HCA:
            _fold_forward(pool, index, slot, ids, length)
    if pool.last_streams is not None:
        pool.last_streams[slot] = _streams(pool, ids[-1])
    return ids


def extend(pool: TablePool, slot: int, tokens: Sequence[int], new: Sequence[int]) -> list[int]:
    """`feed`, and all of it committed."""
    ids = feed(pool, slot, tokens, new)
    pool.commit(slot, len(new))
    return ids


def check(pool: TablePool, slot: int, tokens: Sequence[int], *, provisional: bool = False) -> None:
    """Everything that the next forward of the slot may read is what the committed tokens say, to the last bit.

    After a forward with `provisional` tokens one window row less is readable: the next token sees window - 1.
    """
    length = len(tokens)
    assert pool.length(slot) == length
    assert int(pool.lengths[slot]) == length
    seen = pool.geometry.window - (1 if provisional else 0)
    for index, layer in enumerate(pool.model.layers):
        _compare(pool, index, Region.WINDOW, slot, tokens, range(max(0, length - seen), length))
        if layer.ratio:
            entries = range(length // layer.ratio)
            _compare(pool, index, Region.ENTRIES, slot, tokens, entries)
        if layer.kind is LayerKind.CSA:
            _compare(pool, index, Region.INDEX, slot, tokens, entries)
            needed = range(max(0, layer.ratio * (length // layer.ratio - 1)), length)
            for region in (Region.STATE, Region.INDEX_STATE):
                _compare(pool, index, region, slot, tokens, needed)
        elif layer.kind is LayerKind.HCA and length % layer.ratio:
            state_D = folded_state(pool, index, slot, length)
            assert torch.equal(state_D, expected_fold(pool, index, tokens)), (index, length)


def check_streams(pool: TablePool, slot: int, tokens: Sequence[int]) -> None:
    """The last token's residual streams; a rollback does not bring older ones back."""
    assert pool.last_streams is not None
    assert torch.equal(pool.last_streams[slot], _streams(pool, tokens[-1]))


def expected_fold(pool: TablePool, index: int, tokens: Sequence[int]) -> Tensor:
    """`max | sum | weighted sum` of the open window, folded here, token by token, in fp32."""
    ratio, channels = pool.model.layers[index].ratio, pool.model.head_dim
    start = len(tokens) // ratio * ratio
    state = None
    for position in range(start, len(tokens)):
        raw = _row(pool, index, Region.STATE, tokens, position)
        state = _fold(state, raw[channels:], raw[:channels])
    assert state is not None
    return torch.cat(state)


def folded_state(pool: TablePool, index: int, slot: int, length: int) -> Tensor:
    """What accumulator and raw rows of a slot amount to at a length, read through the views."""
    ratio, channels = pool.model.layers[index].ratio, pool.model.head_dim
    row = pool.view(index, Region.ACCUMULATOR).read(torch.tensor([slot]))[0]
    count, start = int(row[-1]), length // ratio * ratio
    state = tuple(row[:-1].split(channels)) if count > start else None
    raw = pool.view(index, Region.STATE)
    for position in range(max(count, start), length):
        raw_D = raw.read(torch.tensor([pool.geometry.fold_row(slot, position)]))[0]
        state = _fold(state, raw_D[channels:], raw_D[:channels])
    assert state is not None
    return torch.cat(state)


def freeze(pool: TablePool) -> dict[str, object]:
    """All of a pool's memory and books, for comparison."""
    memory = {name: _bytes(tensor) for name, tensor in pool.tensors.items()}
    return memory | {
        "books": {slot: attrs.asdict(book) for slot, book in pool._books.items()},
        "slots": sorted(pool._slots._free),
        "pages": sorted(pool._pages._free),
        "holders": list(pool._pages._holders),
        "version": pool.version,
    }


def slot_memory(pool: TablePool, slot: int) -> dict[str, bytes]:
    """Stored bytes of everything that belongs to a live slot: its rows of every component, and its pages."""
    found = {}
    for component in pool.components():
        if component.format is None:
            found[component.name] = _bytes(component.storage[slot])
            continue
        rows = list(component.rows_of_slot(slot))
        for page in pool._books[slot].pages:
            rows += component.rows_of_page(page)
        encoded = component.format.export_rows(component.storage, torch.tensor(rows))
        found[component.name] = _bytes(encoded)
    return found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _streams(pool: TablePool, token: int) -> Tensor:
    return value("streams", -1, pool.model.hc_mult * pool.model.hidden_size, (token,))


def _row(pool: TablePool, index: int, region: Region, ids: Sequence[int], at: int) -> Tensor:
    """The value of position (or entry) `at`: its token's, or all tokens' that an entry pools."""
    ratio = pool.model.layers[index].ratio
    if region in (Region.ENTRIES, Region.INDEX):
        own = tuple(ids[max(0, ratio * (at - 1)) : ratio * (at + 1)])
    else:
        own = (ids[at],)
    return value(region.value, index, pool.view(index, region).format.row_dim, own)


def _address(pool: TablePool, index: int, region: Region, slot: int, at: int) -> int:
    """Written out by hand from the table of geometry.py's docstring, not through its functions."""
    geometry, ratio = pool.geometry, pool.model.layers[index].ratio
    if region is Region.WINDOW:
        return slot * geometry.ring_rows + at % geometry.ring_rows
    if region in (Region.ENTRIES, Region.INDEX):
        per_page = geometry.page_tokens // ratio
        page = int(pool.block_table[slot, at // per_page])
        assert page >= 0, f"slot {slot} has no page for entry {at}"
        in_front = isinstance(pool, UnifiedPool) and region is Region.ENTRIES
        base = geometry.max_requests * geometry.ring_rows if in_front else 0
        return base + page * per_page + at % per_page
    ring = geometry.in_place_tokens
    if pool.model.layers[index].kind is LayerKind.CSA:
        ring += 2 * ratio - 1
    return slot * ring + at % ring


def _put(
    pool: TablePool, index: int, region: Region, slot: int, ids: Sequence[int], span: Iterable[int]
) -> None:
    places = list(span)
    if places:
        rows = torch.tensor([_address(pool, index, region, slot, at) for at in places])
        values = torch.stack([_row(pool, index, region, ids, at) for at in places])
        pool.view(index, region).write(rows, values)


def _compare(
    pool: TablePool, index: int, region: Region, slot: int, ids: Sequence[int], span: Iterable[int]
) -> None:
    places = list(span)
    if places:
        view = pool.view(index, region)
        rows = torch.tensor([_address(pool, index, region, slot, at) for at in places])
        wanted = view.format.round(
            torch.stack([_row(pool, index, region, ids, at) for at in places])
        )
        same = (view.read(rows) == wanted).all(-1).tolist()
        wrong = [at for at, equal in zip(places, same, strict=True) if not equal]
        assert not wrong, f"layer {index} {region.value} of slot {slot}: {wrong} of {places}"


def _fold(
    state: tuple[Tensor, ...] | None, gate_C: Tensor, kv_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if state is None:
        return gate_C, torch.ones_like(gate_C), kv_C
    old_max_C, sum_C, weighted_C = state
    max_C = torch.maximum(old_max_C, gate_C)
    keep_C, take_C = torch.exp(old_max_C - max_C), torch.exp(gate_C - max_C)
    return max_C, sum_C * keep_C + take_C, weighted_C * keep_C + take_C * kv_C


def _fold_forward(pool: TablePool, index: int, slot: int, ids: Sequence[int], length: int) -> None:
    """Fold what can no longer be rolled back, from the accumulator's own count up, then keep the newest raw rows."""
    ratio, channels = pool.model.layers[index].ratio, pool.model.head_dim
    margin = pool.geometry.in_place_tokens
    accumulator, raw = pool.view(index, Region.ACCUMULATOR), pool.view(index, Region.STATE)
    row = accumulator.read(torch.tensor([slot]))[0]
    count = int(row[-1])
    state = tuple(row[:-1].split(channels)) if count % ratio else None
    for position in range(count, max(count, len(ids) - margin)):
        if position < length:
            place = torch.tensor([_address(pool, index, Region.STATE, slot, position)])
            raw_D = raw.read(place)[0]
        else:
            raw_D = _row(pool, index, Region.STATE, ids, position)
        state = _fold(None if position % ratio == 0 else state, raw_D[channels:], raw_D[:channels])
        count = position + 1
    if state is not None:
        values = torch.cat((*state, torch.tensor([float(count)])))
        accumulator.write(torch.tensor([slot]), values.unsqueeze(0))
    first = max(length, len(ids) - margin)
    _put(pool, index, Region.STATE, slot, ids, range(first, len(ids)))
