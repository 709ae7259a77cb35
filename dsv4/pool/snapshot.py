"""When a snapshot fits a pool, and when it is used up."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.config import ModelConfig
from dsv4.errors import SnapshotError
from dsv4.pool.base import Snapshot
from dsv4.pool.formats import RowFormat
from dsv4.pool.state import StatePart


def snapshot_signature(
    model: ModelConfig, rows: RowFormat, keys: RowFormat
) -> tuple[tuple[str, object], ...]:
    """What two pools must share for an exact attach, as (name, value) pairs.

    Not in it, because position order makes them not matter: ring rows, in_place_tokens, page size, number of
    slots and pages, plane size, pool family.
    """
    layers = tuple((layer.kind.value, layer.ratio, layer.is_draft) for layer in model.layers)
    streams = model.hc_mult * model.hidden_size if model.draft_layers else 0
    return (
        ("layers", layers),
        ("sliding_window", model.sliding_window),
        ("head_dim", model.head_dim),
        ("qk_rope_head_dim", model.qk_rope_head_dim),
        ("index_head_dim", model.index_head_dim),
        ("row_format", rows.name),
        ("index_format", keys.name),
        ("kv_quant", model.kv_quant),
        ("last_streams", streams),
    )


def check_fits(
    snapshot: Snapshot, signature: tuple[tuple[str, object], ...], parts: Sequence[StatePart]
) -> None:
    """Raise SnapshotError, with every difference, unless the snapshot attaches exactly to these parts."""
    if not snapshot.tensors:
        raise SnapshotError(
            f"snapshot of length {snapshot.length}: it was dropped; export the sequence again"
        )
    if snapshot.signature != signature:
        raise SnapshotError(
            f"snapshot of length {snapshot.length} does not fit this pool: "
            f"{_differences(snapshot.signature, signature)}; attach it to a pool of the same model and formats"
        )
    expected: dict[str, int] = {}
    for part in parts:
        expected |= part.exported_rows(snapshot.length)
    given = {name: rows.shape[0] for name, rows in snapshot.tensors.items()}
    if given != expected:
        names = sorted(name for name, _ in given.items() ^ expected.items())
        listed = ", ".join(
            f"{name} has {given.get(name, 'no')} rows, needs {expected.get(name, 'none')}"
            for name in dict.fromkeys(names)
        )
        raise SnapshotError(
            f"snapshot of length {snapshot.length} does not fit this pool: {listed}; export it again"
        )


def drop(snapshot: Snapshot) -> None:
    """Let go of a snapshot's memory; SnapshotError if that happened before."""
    if not snapshot.tensors:
        raise SnapshotError(
            f"snapshot of length {snapshot.length}: it was dropped already; drop it once"
        )
    snapshot.tensors.clear()


def _differences(given: tuple[object, ...], expected: tuple[tuple[str, object], ...]) -> str:
    theirs = dict(pair for pair in given if isinstance(pair, tuple) and len(pair) == 2)
    listed = [
        f"{name} is {theirs.get(name)}, the pool has {value}"
        for name, value in expected
        if theirs.get(name) != value
    ]
    return "; ".join(listed) or "its signature is of another form"
