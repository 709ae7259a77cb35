"""Builders that fill with the Triton kernel keep every promise, on a GPU where there is one, else interpreted."""

from __future__ import annotations

import importlib.util

import attrs
import pytest
import torch

from dsv4.config import BackendConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.metadata.base import FillKernel, MetadataBuilder
from dsv4.metadata.fill_triton import TritonFill
from dsv4.metadata.unified import UnifiedMetadataBuilder
from dsv4.pool.base import KVPool
from dsv4.pool.three_pool import ThreePool
from dsv4.pool.unified import UnifiedPool
from dsv4.testing import MetadataBuilderConformance


class FillsWithTriton(UnifiedMetadataBuilder):
    def __init__(
        self, pool: KVPool, config: BackendConfig, fill: type[FillKernel] | None = None
    ) -> None:
        super().__init__(pool, config, fill or TritonFill)


class FilledUnified(UnifiedPool):
    @classmethod
    def builder_class(cls) -> type[MetadataBuilder]:
        return FillsWithTriton


class FilledThree(ThreePool):
    @classmethod
    def builder_class(cls) -> type[MetadataBuilder]:
        return FillsWithTriton


@attrs.frozen(kw_only=True)
class FilledUnifiedConfig(UnifiedPoolConfig):
    pool_class = FilledUnified


@attrs.frozen(kw_only=True)
class FilledThreeConfig(ThreePoolConfig):
    pool_class = FilledThree


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


class TestFill(MetadataBuilderConformance):
    @pytest.fixture(params=[FilledUnifiedConfig, FilledThreeConfig])
    def pool_config_type(self, request: pytest.FixtureRequest) -> type[PoolConfig]:
        found: type[PoolConfig] = request.param
        return found

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
