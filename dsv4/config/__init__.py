"""Typed configuration: the model's architecture, the pool, the backend and the engine."""

from dsv4.config.backend import BackendConfig, EngineConfig
from dsv4.config.environment import checks_enabled, kernels_from_env
from dsv4.config.layers import LayerConfig, LayerKind, YarnConfig
from dsv4.config.model import ModelConfig
from dsv4.config.pool import PoolConfig, ThreePoolConfig, UnifiedPoolConfig

__all__ = [
    "BackendConfig",
    "EngineConfig",
    "LayerConfig",
    "LayerKind",
    "ModelConfig",
    "PoolConfig",
    "ThreePoolConfig",
    "UnifiedPoolConfig",
    "YarnConfig",
    "checks_enabled",
    "kernels_from_env",
]
