"""Every scenario that takes a `family` runs on both pools."""

from __future__ import annotations

import pytest

from dsv4.config import PoolConfig
from tests.scenarios.harness import FAMILIES


@pytest.fixture(params=FAMILIES, ids=["unified", "three-pool"])
def family(request: pytest.FixtureRequest) -> type[PoolConfig]:
    found: type[PoolConfig] = request.param
    return found
