"""The unified pool's tables, by hand: rings of all slots first, entries behind."""

import torch

from dsv4.config import UnifiedPoolConfig
from dsv4.pool.base import Region
from dsv4.pool.unified import UnifiedPool
from tests.pool.sequences import make_pool, small_model

# 2 slots, window 16 and D = 3: rings of 18 rows. 3 pages of 32 tokens: 8 CSA and 2 HCA entries each.
SIZES = {"max_requests": 2, "in_place_tokens": 3, "num_pages": 3, "row_format": "bf16"}
HAND_TABLE = {
    "layer0.kv": (36, 24),
    "layer1.kv": (36 + 24, 24),
    "layer1.state": (2 * (8 + 2), 4 * 24),
    "layer1.index_state": (2 * (8 + 2), 4 * 32),
    "layer1.index": (24, 32),
    "layer2.kv": (36 + 6, 24),
    "layer2.state": (2 * 3, 2 * 24),
    "layer2.accumulator": (2, 3 * 24 + 1),
    "layer3.kv": (36, 24),
    "last_streams": (2, 2 * 8),
    "lengths": (2,),
    "block_table": (2, 3),
}


def test_every_table_has_the_size_of_the_hand_table() -> None:
    pool = make_pool(UnifiedPool, **SIZES)
    assert {name: tuple(tensor.shape) for name, tensor in pool.tensors.items()} == HAND_TABLE
    kinds = {name: tensor.dtype for name, tensor in pool.tensors.items()}
    assert {kinds[name] for name in kinds if name.endswith(".kv")} == {torch.bfloat16}
    assert kinds["layer1.index"] == torch.float32  # the model's own dtype
    assert kinds["layer2.accumulator"] == kinds["layer1.state"] == torch.float32
    assert kinds["lengths"] == kinds["block_table"] == torch.int32


def test_window_and_entries_are_views_of_one_table() -> None:
    pool = make_pool(UnifiedPool, **SIZES)
    window, entries = pool.view(1, Region.WINDOW), pool.view(1, Region.ENTRIES)
    assert window.storage is entries.storage is pool.tensors["layer1.kv"]
    assert (window.num_rows, entries.num_rows) == (36, 60)
    assert pool.geometry.entry_base == 36
    assert pool.geometry.entry_row(4, 2, 7) == 59


def test_components_of_one_table_share_its_memory_and_name_their_rows() -> None:
    pool = make_pool(UnifiedPool, **SIZES)
    found = {component.name: component for component in pool.components()}
    window, entries = found["layer2.window"], found["layer2.entries"]
    assert window.table == entries.table == "layer2.kv"
    assert window.data_ptr == entries.data_ptr == pool.tensors["layer2.kv"].data_ptr()
    assert window.nbytes == entries.nbytes == 42 * 24 * 2
    assert window.strides == (24, 1)
    assert (window.rows_per_slot, window.rows_per_page, window.first_row) == (18, 0, 0)
    assert (entries.rows_per_slot, entries.rows_per_page, entries.first_row) == (0, 2, 36)
    assert window.rows_of_slot(1) == range(18, 36)
    assert entries.rows_of_page(2) == range(40, 42)
    assert len(window.rows_of_page(0)) == len(entries.rows_of_slot(0)) == 0


def test_packed_rows_share_planes_over_the_whole_table() -> None:
    pool = make_pool(UnifiedPool, **(SIZES | {"row_format": "fp8", "index_format": "fp4"}))
    # 16 e4m3 + 8 bf16 + 8 scale bytes; 60 rows are one plane of 64, padded to a multiple of 32.
    assert pool.tensors["layer1.kv"].shape == (1, 64 * 40)
    assert pool.tensors["layer1.index"].shape == (1, 64 * 17)
    assert pool.view(1, Region.ENTRIES).num_rows == 60


def test_a_model_that_compresses_nothing_needs_no_pages() -> None:
    model = small_model(ratios=(0, 0), drafts=0)
    pool = UnifiedPool(UnifiedPoolConfig(max_requests=2, max_context=1000), model)
    assert pool.num_free_pages == 0
    assert set(pool.tensors) == {"layer0.kv", "layer1.kv", "lengths", "block_table"}
    assert pool.block_table.shape == (2, 0)
    assert pool.last_streams is None
