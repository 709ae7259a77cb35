"""Parts by name: pool configs and kernel sets, built in or from other packages' entry points.

    dsv4.pools      name -> PoolConfig subclass whose `pool_class` is the KVPool class
    dsv4.kernels    name -> KernelFamily subclass

Nothing is imported before it is asked for, so a broken plug-in or a missing GPU library costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, cast

from dsv4.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from dsv4.config.pool import PoolConfig
    from dsv4.kernels.base import KernelFamily
    from dsv4.pool.base import KVPool

POOL_GROUP = "dsv4.pools"
KERNEL_GROUP = "dsv4.kernels"

_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    POOL_GROUP: {
        "unified": "dsv4.config.pool:UnifiedPoolConfig",
        "three-pool": "dsv4.config.pool:ThreePoolConfig",
    },
    KERNEL_GROUP: {
        "torch": "dsv4.kernels.torch_set:TorchKernels",
        "triton": "dsv4.kernels.triton_set:TritonKernels",
    },
}


def pool_names() -> tuple[str, ...]:
    """Names of the pool families, as `type` in config files: built-ins first."""
    return tuple(_targets(POOL_GROUP))


def pool_config_class(name: str) -> type[PoolConfig]:
    """The config class of a pool family. Raises ConfigError for an unknown name."""
    return cast("type[PoolConfig]", _lookup(POOL_GROUP, name, "pool type", ConfigError))


def pool_name(config_type: type[PoolConfig]) -> str:
    """The registered name of a config class. Raises ConfigError if it has none."""
    own = f"{config_type.__module__}:{config_type.__qualname__}"
    for name, target in _targets(POOL_GROUP).items():
        if target == own or _import(target, name) is config_type:
            return name
    raise ConfigError(
        f"pool config {config_type.__name__}: has no name to be saved under; "
        f"register it as an entry point of the group {POOL_GROUP}"
    )


def pool_class(config: PoolConfig | type[PoolConfig]) -> type[KVPool]:
    """The pool class that a config (or its class) chooses by its type. Raises ConfigError if none."""
    config_type = config if isinstance(config, type) else type(config)
    target = getattr(config_type, "pool_class", None)
    if target is None:
        raise ConfigError(
            f"pool config {config_type.__name__}: chooses no pool; use UnifiedPoolConfig or "
            "ThreePoolConfig, or give the class an attribute pool_class"
        )
    if isinstance(target, str):
        target = _import(target, config_type.__name__)
    return cast("type[KVPool]", target)


def kernel_set_names() -> tuple[str, ...]:
    """Names of the kernel sets, built-ins first."""
    return tuple(_targets(KERNEL_GROUP))


def kernel_family(name: str) -> type[KernelFamily]:
    """The kernel set of a name, not yet built. Raises KernelError for an unknown name."""
    return cast("type[KernelFamily]", _lookup(KERNEL_GROUP, name, "kernels", KernelError))


def _targets(group: str) -> dict[str, str]:
    """Name -> `module:attribute`. A name that two packages claim keeps the first; built-ins are first."""
    targets = dict(_BUILT_IN[group])
    for entry_point in sorted(metadata.entry_points(group=group), key=lambda entry: entry.name):
        targets.setdefault(entry_point.name, entry_point.value)
    return targets


def _lookup(group: str, name: str, what: str, error: type[ConfigError | KernelError]) -> object:
    targets = _targets(group)
    if name not in targets:
        close = difflib.get_close_matches(str(name), targets, n=1, cutoff=0.4)
        hint = f" (nearest known name: {close[0]!r})" if close else ""
        raise error(
            f"{what} {name!r}: must be one of {', '.join(targets)}{hint}; "
            f"correct it or install the package that registers it under {group}"
        )
    return _import(targets[name], name)


def _import(target: str, name: str) -> object:
    """The object at `module:attribute`."""
    module, _, attribute = target.partition(":")
    try:
        value: object = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{name}: {target} cannot be imported ({error}); reinstall the package that registers it"
        ) from error
    return value
