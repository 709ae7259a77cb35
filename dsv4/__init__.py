"""dsv4: DeepSeek-V4 decoding with pluggable KV memory pools.

The names below load on first use, so that `import dsv4` alone costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.backend import Backend
    from dsv4.config import (
        BackendConfig,
        EngineConfig,
        LayerConfig,
        LayerKind,
        ModelConfig,
        PoolConfig,
        ThreePoolConfig,
        UnifiedPoolConfig,
        YarnConfig,
    )
    from dsv4.engine import Completion, Engine, Request
    from dsv4.metadata.batch import ForwardBatch
    from dsv4.model.model import Model, load

__version__ = "0.1.0"

_HOME = {
    "Backend": "dsv4.backend",
    "BackendConfig": "dsv4.config",
    "Completion": "dsv4.engine",
    "Engine": "dsv4.engine",
    "EngineConfig": "dsv4.config",
    "ForwardBatch": "dsv4.metadata.batch",
    "LayerConfig": "dsv4.config",
    "LayerKind": "dsv4.config",
    "Model": "dsv4.model.model",
    "ModelConfig": "dsv4.config",
    "PoolConfig": "dsv4.config",
    "Request": "dsv4.engine",
    "ThreePoolConfig": "dsv4.config",
    "UnifiedPoolConfig": "dsv4.config",
    "YarnConfig": "dsv4.config",
    "load": "dsv4.model.model",
}

__all__ = [
    "Backend",
    "BackendConfig",
    "Completion",
    "Engine",
    "EngineConfig",
    "ForwardBatch",
    "LayerConfig",
    "LayerKind",
    "Model",
    "ModelConfig",
    "PoolConfig",
    "Request",
    "ThreePoolConfig",
    "UnifiedPoolConfig",
    "YarnConfig",
    "__version__",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
