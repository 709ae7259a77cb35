"""Compiles every configuration of every Triton kernel for every target; a program, for the interpreter must be off.

python -m tests.kernels.compile_variants PART PARTS prints one JSON object a line, for each PARTS-th configuration.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator
from types import ModuleType

from dsv4 import kernels, metadata
from dsv4.triton_launch import TARGETS, KernelVariant, compile_variant


def modules() -> Iterator[ModuleType]:
    """Every module of kernels or device functions."""
    for package in (kernels, metadata):
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.endswith("_triton"):
                yield importlib.import_module(f"{package.__name__}.{module.name}")


def all_variants() -> list[KernelVariant]:
    """What launchers can choose, by the table of each module that has one; a table may quote another module's."""
    found: list[KernelVariant] = []
    for module in modules():
        table = module.variants() if hasattr(module, "variants") else ()
        found += [variant for variant in table if variant not in found]
    return found


def compiled(variant: KernelVariant, target: str) -> dict[str, object]:
    """Resources of one configuration, or the compiler's complaint."""
    report: dict[str, object] = {"variant": variant.name, "target": target}
    start = time.perf_counter()
    try:
        resources = compile_variant(variant, TARGETS[target])
    except Exception as error:  # noqa: BLE001  the compiler raises all kinds, and each is a finding
        report["error"] = f"{type(error).__name__}: {error}"[:2000]
    else:
        report |= {
            "shared": resources.shared,
            "registers": resources.registers,
            "spilled": resources.spilled,
        }
    return report | {"seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    part, parts = map(int, sys.argv[1:])
    jobs = [(variant, target) for variant in all_variants() for target in variant.targets]
    for variant, target in jobs[part::parts]:
        print(json.dumps(compiled(variant, target)), flush=True)  # noqa: T201  a program's output


if __name__ == "__main__":
    main()
