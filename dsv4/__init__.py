"""dsv4: DeepSeek-V4 decoding with pluggable KV memory pools."""

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
from dsv4.metadata.batch import ForwardBatch

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendConfig",
    "EngineConfig",
    "ForwardBatch",
    "LayerConfig",
    "LayerKind",
    "ModelConfig",
    "PoolConfig",
    "ThreePoolConfig",
    "UnifiedPoolConfig",
    "YarnConfig",
    "__version__",
]
