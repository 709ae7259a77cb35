"""The suites are an extra: the library does without pytest, and says what to install where it cannot."""

from __future__ import annotations

import subprocess
import sys

import dsv4.testing
from dsv4.kernels.base import KernelSet


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_without_pytest_the_import_says_what_to_install() -> None:
    code = """
import sys
sys.modules["pytest"] = None
try:
    import dsv4.testing
except ImportError as error:
    print(error)
"""
    assert run(code) == (
        "dsv4.testing needs pytest, which is not installed; "
        'install the extra: pip install "dsv4[testing]"'
    )


def test_the_library_imports_no_pytest() -> None:
    code = """
import sys
import dsv4.backend, dsv4.model.model, dsv4.engine, dsv4.cli
print(sorted(name for name in sys.modules if name in ("pytest", "hypothesis", "dsv4.testing")))
"""
    assert run(code) == "[]"


def test_every_op_has_a_suite() -> None:
    suites = {name.removesuffix("Conformance").lower() for name in dsv4.testing.__all__}
    # fill is tested through the builder that it fills for
    ops = {"attention" if op == "attend" else op for op in KernelSet.OPS} - {"fill"}
    assert suites == ops | {"kvpool", "metadatabuilder"}
