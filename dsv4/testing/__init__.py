"""Conformance suites: subclass one in your tests, give its fixture, and every numbered promise is tested.

| suite | fixture to give | interface |
|---|---|---|
| KVPoolConformance | pool_config_type | dsv4.pool.base.KVPool |
| MetadataBuilderConformance | pool_config_type | dsv4.metadata.base.MetadataBuilder |
| StoreConformance ... ExpertsConformance | kernel | the op of that name in dsv4.kernels.base |

Expected values come from plain loops in float64 and from token ids, never from the code under test. All suites take an
optional fixture `device`. They need pytest: `pip install "dsv4[testing]"`.
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "dsv4.testing needs pytest, which is not installed; "
        'install the extra: pip install "dsv4[testing]"'
    ) from error

# Before the suites are imported, so that their asserts explain themselves.
_ASSERTING = (
    "attention builder compare compress experts kernel_setup linear memory mix player pool "
    "norm pool_history pool_setup score select store"
)
pytest.register_assert_rewrite(*(f"dsv4.testing.{name}" for name in _ASSERTING.split()))

from dsv4.testing.attention import AttentionConformance  # noqa: E402  (see above)
from dsv4.testing.builder import MetadataBuilderConformance  # noqa: E402
from dsv4.testing.compress import CompressConformance  # noqa: E402
from dsv4.testing.experts import ExpertsConformance  # noqa: E402
from dsv4.testing.linear import LinearConformance  # noqa: E402
from dsv4.testing.mix import MixConformance  # noqa: E402
from dsv4.testing.norm import NormConformance  # noqa: E402
from dsv4.testing.pool import KVPoolConformance  # noqa: E402
from dsv4.testing.score import ScoreConformance  # noqa: E402
from dsv4.testing.select import SelectConformance  # noqa: E402
from dsv4.testing.store import StoreConformance  # noqa: E402

__all__ = [
    "AttentionConformance",
    "CompressConformance",
    "ExpertsConformance",
    "KVPoolConformance",
    "LinearConformance",
    "MetadataBuilderConformance",
    "MixConformance",
    "NormConformance",
    "ScoreConformance",
    "SelectConformance",
    "StoreConformance",
]
