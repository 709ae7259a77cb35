"""The three-pool's tables, by hand: window rows and entries apart, each from row 0."""

import pytest
import torch

from dsv4.errors import ConfigError
from dsv4.pool.base import Region
from dsv4.pool.three_pool import ThreePool
from dsv4.pool.unified import UnifiedPool
from tests.pool.sequences import make_pool

SIZES = {"max_requests": 2, "in_place_tokens": 3, "num_pages": 3}
HAND_TABLE = {
    "layer0.window": (36, 24),
    "layer1.window": (36, 24),
    "layer1.entries": (24, 24),
    "layer1.state": (20, 96),
    "layer1.index_state": (20, 128),
    "layer1.index": (24, 32),
    "layer2.window": (36, 24),
    "layer2.entries": (6, 24),
    "layer2.state": (6, 48),
    "layer2.accumulator": (2, 73),
    "layer3.window": (36, 24),
    "last_streams": (2, 16),
    "lengths": (2,),
    "block_table": (2, 3),
}


def test_every_table_has_the_size_of_the_hand_table() -> None:
    pool = make_pool(ThreePool, **SIZES)
    assert {name: tuple(tensor.shape) for name, tensor in pool.tensors.items()} == HAND_TABLE
    assert pool.tensors["layer1.entries"].dtype == torch.float32


def test_window_and_entries_are_tables_of_their_own() -> None:
    pool = make_pool(ThreePool, **SIZES)
    window, entries = pool.view(1, Region.WINDOW), pool.view(1, Region.ENTRIES)
    assert window.storage is pool.tensors["layer1.window"]
    assert entries.storage is pool.tensors["layer1.entries"]
    assert (window.num_rows, entries.num_rows) == (36, 24)
    assert pool.geometry.entry_base == 0
    assert pool.geometry.entry_row(4, 2, 7) == 23


def test_both_families_register_components_of_the_same_names() -> None:
    names = [
        {component.name for component in make_pool(family, **SIZES).components()}
        for family in (UnifiedPool, ThreePool)
    ]
    assert names[0] == names[1] == set(HAND_TABLE)


@pytest.mark.parametrize(
    ("layer", "region", "message"),
    [
        (0, Region.ENTRIES, "layer 0: a sliding layer of this model has no region entries"),
        (2, Region.INDEX, "layer 2: a hca layer of this model has no region index"),
        (1, Region.ACCUMULATOR, "layer 1: a csa layer of this model has no region accumulator"),
        (4, Region.WINDOW, "layer 4: a missing layer of this model"),
        (-1, Region.WINDOW, "layer -1: a missing layer of this model"),
    ],
)
def test_a_view_that_does_not_exist_is_refused(layer: int, region: Region, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pool(ThreePool).view(layer, region)
