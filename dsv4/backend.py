"""Backend: a pool, its metadata builder and a kernel set, composed for one model."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs import frozen

from dsv4 import registry
from dsv4.config import BackendConfig, ModelConfig, PoolConfig, kernels_from_env
from dsv4.errors import ConfigError, KernelError
from dsv4.kernels.base import KernelSet
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
    """Each op from the set that its override or `kernels` names; `auto` takes the first of PREFERENCE that can."""
    unknown = [op for op in config.overrides if op not in KernelSet.OPS]
    if unknown:
        known = ", ".join(KernelSet.OPS)
        raise ConfigError(f"overrides: {unknown[0]!r} is no op; known ops are {known}")
    wanted = kernels_from_env(config.kernels)
    served = {
        op: _usable(config.overrides.get(op, wanted), op, model, config.pool, device)
        for op in KernelSet.OPS
    }
    sets = {
        name: registry.kernel_family(name).build(deterministic=config.deterministic)
        for name in set(served.values())
    }
    # the set that attends gives its name: what users ask is which attention runs
    return attrs.evolve(
        sets[served["attend"]], **{op: getattr(sets[name], op) for op, name in served.items()}
    )


def reasons(
    op: str, model: ModelConfig, pool: PoolConfig, device: torch.device
) -> dict[str, str | None]:
    """In the order in which `auto` asks: why each installed kernel set would not run an op; None = it would."""
    names = [n for n in PREFERENCE if n in registry.kernel_set_names()]
    return {name: _why_not(name, op, model, pool, device, auto=True) for name in names}


def _why_not(
    name: str, op: str, model: ModelConfig, pool: PoolConfig, device: torch.device, *, auto: bool
) -> str | None:
    family = registry.kernel_family(name)
    reason = family.why_not_op(op, device, model, pool)
    return reason or (family.only_by_name(device) if auto else None)


def _usable(name: str, op: str, model: ModelConfig, pool: PoolConfig, device: torch.device) -> str:
    """The set that serves an op."""
    if name == "auto":
        return next(n for n, why in reasons(op, model, pool, device).items() if why is None)
    reason = _why_not(name, op, model, pool, device, auto=False)
    if reason is not None:
        raise KernelError(
            f"kernels {name!r}, op {op}: {reason}; choose another set or kernels='auto'"
        )
    return name
