"""One geometry sizes and addresses: its image is the allocation, for any sizes (scenarios 3, 4, 5, 37)."""

import attrs
import pytest
import torch

from dsv4.errors import ConfigError
from dsv4.pool.geometry import PoolGeometry, num_visible
from dsv4.pool.tables import TablePool
from tests.pool.sequences import FAMILIES, make_pool, small_model


def geometry(**sizes: int) -> PoolGeometry:
    defaults = {
        "max_requests": 3,
        "window": 16,
        "in_place_tokens": 1,
        "page_tokens": 32,
        "pages_per_slot": 2,
        "num_pages": 6,
    }
    given = defaults | sizes
    given.setdefault("ring_rows", given["window"] + given["in_place_tokens"] - 1)
    return PoolGeometry(**given)


@pytest.mark.parametrize("window", [1, 5, 16, 128])
@pytest.mark.parametrize("margin", [1, 2, 4, 5, 6, 8, 12])
def test_the_image_of_window_addresses_is_exactly_the_allocation(window: int, margin: int) -> None:
    sizes = geometry(window=window, in_place_tokens=margin)
    rows = {sizes.window_row(s, p) for s in range(3) for p in range(3 * sizes.ring_rows)}
    assert rows == set(range(sizes.window_rows))


@pytest.mark.parametrize("page_tokens", [32, 64, 256, 96])
@pytest.mark.parametrize("ratio", [1, 4, 16, 32])
@pytest.mark.parametrize("base", [0, 48])
def test_the_image_of_entry_addresses_is_exactly_the_allocation(
    page_tokens: int, ratio: int, base: int
) -> None:
    sizes = geometry(page_tokens=page_tokens, entry_base=base)
    per_page = page_tokens // ratio
    rows = [
        sizes.entry_row(ratio, 2 * slot + sizes.logical_page(ratio, entry), entry)
        for slot in range(3)
        for entry in range(2 * per_page)
    ]
    assert sorted(rows) == list(range(base, base + 6 * per_page))
    assert sizes.entry_rows(ratio) == 6 * per_page
    assert sizes.max_entries(ratio) == 2 * per_page


@pytest.mark.parametrize("ratio", [3, 4])
@pytest.mark.parametrize("margin", [1, 2, 4, 5, 6, 8, 12])
def test_the_image_of_state_addresses_is_exactly_the_allocation(ratio: int, margin: int) -> None:
    sizes = geometry(in_place_tokens=margin)
    ring = 2 * ratio + margin - 1
    rows = {sizes.overlap_row(ratio, s, p) for s in range(3) for p in range(3 * ring)}
    assert rows == set(range(3 * ring))
    folded = {sizes.fold_row(s, p) for s in range(3) for p in range(3 * margin)}
    assert folded == set(range(3 * margin))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_tokens", [32, 64, 256])
@pytest.mark.parametrize("window", [16, 128])
def test_the_components_of_a_table_tile_its_rows(
    family: type[TablePool], page_tokens: int, window: int
) -> None:
    model = small_model(window=window)
    pool = make_pool(family, model, page_tokens=page_tokens, in_place_tokens=3)
    rows: dict[str, list[int]] = {}
    for component in pool.components():
        owned = rows.setdefault(component.table, [])
        if component.rows_per_slot:
            for slot in range(pool.geometry.max_requests):
                owned += component.rows_of_slot(slot)
        else:
            for page in range(pool.geometry.num_pages):
                owned += component.rows_of_page(page)
    for name, table in family.storage_tables(pool.config, model).items():
        assert sorted(rows[name]) == list(range(table.num_rows)), name
    assert rows.keys() == pool.tensors.keys()


@pytest.mark.parametrize("margin", [2, 4, 12])
def test_a_ring_that_provisional_writes_would_overrun_is_refused(margin: int) -> None:
    geometry(in_place_tokens=margin, ring_rows=16 + margin - 1)
    with pytest.raises(ConfigError, match=f"needs at least {16 + margin - 1} rows"):
        geometry(in_place_tokens=margin, ring_rows=16 + margin - 2)


@pytest.mark.parametrize("ratio", [1, 3, 4, 16, 128])
def test_an_entry_is_visible_once_its_last_token_is_there(ratio: int) -> None:
    for position in range(-2, 3 * ratio + 2):
        closed = sum(ratio * (entry + 1) - 1 <= position for entry in range(position + 1))
        assert num_visible(position, ratio) == closed
    positions = torch.arange(-2, 3 * ratio + 2)
    listed = [num_visible(position, ratio) for position in positions.tolist()]
    assert num_visible(positions, ratio).tolist() == listed


def test_addresses_of_tensors_and_of_ints_agree() -> None:
    sizes = geometry(in_place_tokens=4, entry_base=57)
    slots, positions = torch.tensor([0, 2, 1]), torch.tensor([40, 0, 17])
    for address in (
        sizes.window_row,
        sizes.fold_row,
        lambda slot, position: sizes.overlap_row(4, slot, position),
        lambda page, entry: sizes.entry_row(4, page, entry),
        lambda page, entry: sizes.index_row(16, page, entry),
    ):
        pairs = zip(slots.tolist(), positions.tolist(), strict=True)
        assert address(slots, positions).tolist() == [address(*pair) for pair in pairs]


def test_a_geometry_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        geometry().num_pages = 7  # type: ignore[misc]
