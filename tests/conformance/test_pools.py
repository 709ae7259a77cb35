"""Our pools and their builders keep every promise of their interfaces."""

from __future__ import annotations

import pytest

from dsv4 import ThreePoolConfig, UnifiedPoolConfig
from dsv4.config import PoolConfig
from dsv4.testing import KVPoolConformance, MetadataBuilderConformance


class TestUnifiedPool(KVPoolConformance, MetadataBuilderConformance):
    @pytest.fixture
    def pool_config_type(self) -> type[PoolConfig]:
        return UnifiedPoolConfig


class TestThreePool(KVPoolConformance, MetadataBuilderConformance):
    @pytest.fixture
    def pool_config_type(self) -> type[PoolConfig]:
        return ThreePoolConfig
