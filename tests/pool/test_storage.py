"""Adopting memory that somebody else owns (scenarios 36, 40): exact, strided, guarded, or refused."""

import math
import random

import pytest
import torch
from torch import Tensor

from dsv4.errors import ConfigError
from dsv4.pool.layout import TableSpec
from dsv4.pool.tables import TablePool
from tests.pool.sequences import CONFIGS, FAMILIES, check, extend, make_pool, small_model

families = pytest.mark.parametrize("family", FAMILIES)
GUARD = 0xA5


def guarded(
    table: TableSpec, *, before: int = 3, after: int = 2, beside: int = 0
) -> tuple[Tensor, Tensor]:
    """(owner, view of the table's shape inside it): guard rows around it, `beside` guard columns per row."""
    widths = [width + beside for width in table.shape[1:]]
    owner = torch.empty((before + table.shape[0] + after, *widths), dtype=table.dtype)
    owner.view(torch.uint8).fill_(GUARD)
    view = owner[before : before + table.shape[0]]
    return owner, view.narrow(-1, 0, table.shape[-1]) if len(widths) else view


def guard_bytes(owner: Tensor, view: Tensor) -> Tensor:
    """The owner's bytes outside the view."""
    outside = torch.ones_like(owner, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return owner[outside].view(torch.uint8)


@families
@pytest.mark.parametrize("rows", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("beside", [0, 64])
def test_nothing_is_written_outside_the_adopted_tensors(
    family: type[TablePool], rows: str, beside: int
) -> None:
    config = CONFIGS[family](
        max_requests=3, max_context=64, page_tokens=32, row_format=rows, in_place_tokens=2
    )
    model, owners = small_model(), {}
    for name, table in family.storage_tables(config, model).items():
        owners[name] = guarded(table, beside=beside if table.format else 0)
    pool = family(config, model, storage={name: view for name, (_, view) in owners.items()})
    chance = random.Random(5)
    for number in range(4):
        for slot in (pool.acquire(), pool.acquire()):
            pool.reserve(slot, 60)
            tokens = extend(
                pool, slot, [], range(100 * number, 100 * number + chance.randint(9, 40))
            )
            tokens = extend(pool, slot, tokens, [1, 2])
            check(pool, slot, tokens)
        fork = pool.fork(1)
        pool.release(0)
        pool.reserve(pool.acquire(), 60)
        pool.attach(0, pool.export(1))
        check(pool, 0, tokens)
        check(pool, fork, tokens)
        for slot in range(3):
            pool.release(slot)
    for name, (owner, view) in owners.items():
        assert pool.tensors[name].data_ptr() == view.data_ptr()
        assert guard_bytes(owner, view).eq(GUARD).all(), name


@families
def test_adopted_memory_is_used_as_it_is(family: type[TablePool]) -> None:
    plain = make_pool(family)
    for component in plain.components():
        assert component.storage is plain.tensors[component.table]
    assert plain.lengths.eq(0).all()
    assert plain.block_table.eq(-1).all()


@families
def test_every_problem_of_the_storage_is_named_at_once(family: type[TablePool]) -> None:
    config, model = CONFIGS[family](max_requests=2, max_context=64), small_model()
    tables = family.storage_tables(config, model)
    storage = {name: torch.empty(table.shape, dtype=table.dtype) for name, table in tables.items()}
    del storage["layer1.state"]
    storage["surplus"] = torch.empty(1)
    storage["layer1.index"] = storage["layer1.index"][:-1]
    storage["layer2.accumulator"] = storage["layer2.accumulator"].double()
    storage["layer2.state"] = torch.empty(48, 2).t()
    storage["last_streams"] = torch.empty(1, 16).expand(2, 16)
    with pytest.raises(ConfigError) as caught:
        family(config, model, storage=storage)
    for part in (
        "surplus is not a table of this pool",
        "layer1.state is missing (torch.float32 [16, 96])",
        "layer1.index is torch.float32 [127, 32], needed is torch.float32 [128, 32]",
        "layer2.accumulator is torch.float64 [2, 73], needed is torch.float32 [2, 73]",
        "layer2.state has strides [1, 2]",
        "last_streams has strides [0, 1]",
        "pass exactly the tables that storage_tables lists",
    ):
        assert part in str(caught.value)


@families
def test_a_pool_beyond_the_device_says_what_it_needs(family: type[TablePool]) -> None:
    config = CONFIGS[family](max_requests=1_000_000, max_context=1, in_place_tokens=1_000)
    with pytest.raises(ConfigError, match=r"cannot be had on cpu .*lower max_requests"):
        family(config, small_model())


@families
def test_rows_that_int32_cannot_count_are_refused(family: type[TablePool]) -> None:
    config = CONFIGS[family](max_requests=2**27, max_context=1)
    with pytest.raises(ConfigError, match=r"2147483648 rows, at most 2147483647 can be addressed"):
        family.estimate(config, small_model((0, 0)))


@families
def test_a_context_that_fp32_cannot_count_is_refused_where_it_is_counted(
    family: type[TablePool],
) -> None:
    config = CONFIGS[family](max_requests=1, max_context=2**24 + 1)
    with pytest.raises(ConfigError, match="max_context 16777217: HCA layers count tokens exactly"):
        family.estimate(config, small_model())
    family.estimate(config, small_model((0, 4)))


def test_poison_is_what_an_uninitialised_pool_may_hold() -> None:
    pool = make_pool(FAMILIES[0], row_format="bf16")
    assert pool.tensors["layer0.kv"].isnan().all()
    assert math.isnan(float(pool.tensors["layer2.accumulator"][0, -1]))
