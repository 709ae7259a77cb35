"""The two environment variables of the library. Read here and nowhere else."""

from __future__ import annotations

import os

from dsv4 import registry
from dsv4.errors import ConfigError
from dsv4.log import get_logger

_log = get_logger(__name__)

AUTO = "auto"


def kernels_from_env(kernels: str = AUTO) -> str:
    """The kernel-set name to use: an explicit `kernels`, else DSV4_KERNELS, else `auto`.

    Raises ConfigError for a DSV4_KERNELS that names no registered set; an empty one counts as unset.
    """
    value = os.environ.get("DSV4_KERNELS", "")
    if kernels != AUTO or value in ("", AUTO):
        return kernels
    known = registry.kernel_set_names()
    if value not in known:
        raise ConfigError(
            f"environment DSV4_KERNELS {value!r}: must be one of auto, {', '.join(known)}; "
            "correct or unset it"
        )
    _log.info("kernels_from_environment", kernels=value)
    return value


def checks_enabled() -> bool:
    """Whether DSV4_CHECK=1 turns on the checks that cost time. Ask once per object, when it is built.

    Raises ConfigError for anything but 0 and 1; an empty or absent variable is 0.
    """
    value = os.environ.get("DSV4_CHECK", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"environment DSV4_CHECK {value!r}: must be 0 or 1; correct or unset it")
    if value == "1":
        _log.info("checks_from_environment")
    return value == "1"
