"""Backend: a pool, its metadata builder and a kernel set, composed for one model."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs import frozen

from dsv4 import registry
from dsv4.config import BackendConfig, ModelConfig, PoolConfig, kernels_from_env
from dsv4.errors import ConfigError, KernelError
from dsv4.kernels.base import KernelFamily, KernelSet
from dsv4.log import get_logger
from dsv4.metadata.base import MetadataBuilder
from dsv4.pool.base import KVPool, MemoryReport

_log = get_logger(__name__)

PREFERENCE = ("hopper", "triton", "torch")
"""Order in which `auto` asks the kernel sets; unknown third-party sets are only taken by name."""


def torch_device(name: str | torch.device) -> torch.device:
    """A usable device, or ConfigError with the ones there are."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # meta has tensors, but nothing in them
    except (RuntimeError, AssertionError) as error:
        found = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        why = "not usable here"
        if str(name).partition(":")[0] == "cuda":
            why = f"torch {torch.__version__} sees {_cuda_devices(len(found) - 1)}"
        raise ConfigError(
            f"device {str(name)!r}: {why}; choose one of {', '.join(found)}"
        ) from error
    return device


def _cuda_devices(count: int) -> str:
    return f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"


@frozen(kw_only=True, eq=False)
class Backend:
    """Everything below the model: memory, addresses, kernels."""

    config: BackendConfig
    """Resolved: no default left open but `kernels`."""
    model: ModelConfig
    pool: KVPool
    builder: MetadataBuilder
    kernels: KernelSet

    @classmethod
    def create(
        cls,
        model: ModelConfig,
        pool: PoolConfig,
        *,
        kernels: str = "auto",
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Backend:
        """Compose a backend; `options` are the other fields of BackendConfig (deterministic, max_batch_tokens, ...).

        The type of `pool` chooses the pool and its metadata builder. Raises ConfigError or KernelError.
        """
        return cls.from_config(model, BackendConfig(pool=pool, kernels=kernels, **options), device)

    @classmethod
    def from_config(
        cls, model: ModelConfig, config: BackendConfig, device: str | torch.device = "cpu"
    ) -> Backend:
        device = torch_device(device)
        config = config.resolved(model)
        kernel_set = build_kernels(model, config, device)
        pool = registry.pool_class(config.pool)(config.pool, model, device)
        builder = pool.builder_class()(pool, config, kernel_set.fill)
        _log.info(
            "backend_created",
            pool=type(pool).__name__,
            kernels=kernel_set.name,
            device=str(device),
            deterministic=config.deterministic,
        )
        return cls(config=config, model=model, pool=pool, builder=builder, kernels=kernel_set)

    @staticmethod
    def estimate(model: ModelConfig, config: BackendConfig) -> MemoryReport:
        """Bytes of pool, metadata and workspace by component, exactly; allocates nothing."""
        config = config.resolved(model)
        pool_class = registry.pool_class(config.pool)
        report = pool_class.estimate(config.pool, model)
        geometry = pool_class.geometry_of(config.pool, model)
        builder = pool_class.builder_class().estimate(model, geometry, config)
        return attrs.evolve(report, components={**report.components, **builder})


def build_kernels(model: ModelConfig, config: BackendConfig, device: torch.device) -> KernelSet:
    """The configured set with its overrides; `auto` takes the first of PREFERENCE that can run."""
    name = kernels_from_env(config.kernels)
    if name == "auto":
        usable = (n for n, why in reasons(model, config.pool, device).items() if why is None)
        name = next(n for n in usable if registry.kernel_family(n).only_by_name(device) is None)
    kernel_set = _usable(name, model, config, device).build(deterministic=config.deterministic)
    replaced = {
        op: getattr(
            _usable(other, model, config, device).build(deterministic=config.deterministic), op
        )
        for op, other in config.overrides.items()
        if _known_op(op)
    }
    return attrs.evolve(kernel_set, **replaced)


def reasons(model: ModelConfig, pool: PoolConfig, device: torch.device) -> dict[str, str | None]:
    """Why each kernel set of PREFERENCE that is installed cannot run; None = it can."""
    names = [n for n in PREFERENCE if n in registry.kernel_set_names()]
    return {n: registry.kernel_family(n).why_not(device, model, pool) for n in names}


def _usable(
    name: str, model: ModelConfig, config: BackendConfig, device: torch.device
) -> type[KernelFamily]:
    family = registry.kernel_family(name)
    reason = family.why_not(device, model, config.pool)
    if reason is not None:
        raise KernelError(f"kernels {name!r}: {reason}; choose another set or kernels='auto'")
    return family


def _known_op(op: str) -> bool:
    if op not in KernelSet.OPS:
        raise ConfigError(f"overrides: {op!r} is no op; known ops are {', '.join(KernelSet.OPS)}")
    return True
