"""A pool of another layout, written outside the library: entries in front, window rings behind them.

    python examples/custom_pool.py [CHECKPOINT_FOLDER]    same tokens as the unified pool, then the conformance suites

With the entries in front a table can be cut behind its pages: what an offloader moves page by page starts at row 0.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import dsv4
from dsv4.pool.formats import RowFormat
from dsv4.pool.geometry import PoolGeometry
from dsv4.pool.layout import TableSpec, entries_share, rows_table, window_share
from dsv4.pool.tables import TablePool
from dsv4.testing import KVPoolConformance, MetadataBuilderConformance


class EntriesFirstPool(TablePool):
    """[ page 0 entries | page 1 entries | ... | slot 0 ring | slot 1 ring | ... ], one table per layer."""

    entries_behind_windows = False

    @classmethod
    def kv_tables(
        cls, number: int, layer: dsv4.LayerConfig, geometry: PoolGeometry, rows: RowFormat
    ) -> Iterator[TableSpec]:
        entries = geometry.entry_rows(layer.ratio) if layer.ratio else 0
        first = -(-entries // rows.plane_rows) * rows.plane_rows  # packed rows share planes
        shares = [attrs.evolve(window_share(number, geometry), first_row=first)]
        if layer.ratio:
            shares.append(entries_share(number, layer.ratio, geometry))
        num_rows = first + geometry.window_rows
        yield rows_table(f"layer{number}.kv", number, rows, num_rows, *shares)


@attrs.frozen(kw_only=True)
class EntriesFirstConfig(dsv4.PoolConfig):
    """The type of the config chooses the pool; nothing has to be registered."""

    pool_class = EntriesFirstPool


EntriesFirstPool.config_type = EntriesFirstConfig


class TestEntriesFirst(KVPoolConformance, MetadataBuilderConformance):
    """Every numbered promise of KVPool and MetadataBuilder."""

    @pytest.fixture
    def pool_config_type(self) -> type[dsv4.PoolConfig]:
        return EntriesFirstConfig


def decode(checkpoint: str, pool_type: type[dsv4.PoolConfig]) -> tuple[int, ...]:
    pool = pool_type(max_requests=2, max_context=1024, row_format="fp8")
    backend = dsv4.BackendConfig(pool=pool, deterministic=True)
    engine = dsv4.Engine(dsv4.load(checkpoint, backend=backend))
    (completion,) = engine.generate(["import os\nimport sys\n\n\ndef main("], max_new_tokens=48)
    return completion.token_ids


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    ours, theirs = decode(folder, EntriesFirstConfig), decode(folder, dsv4.UnifiedPoolConfig)
    print(f"same {len(theirs)} tokens as the unified pool: {'yes' if ours == theirs else 'NO'}")
    suites = pytest.main(["-q", "--import-mode=importlib", str(Path(__file__))])
    sys.exit(int(suites) or int(ours != theirs))
