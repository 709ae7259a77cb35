"""Parts by name: built-ins, entry points, and classes that name their pool themselves."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import pytest
import structlog
from attrs import field, frozen

from dsv4 import registry
from dsv4.config import BackendConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.errors import ConfigError, KernelError
from dsv4.log import get_logger


class PaperPool:
    """Stands for a third party's KVPool."""


@frozen(kw_only=True)
class PaperPoolConfig(PoolConfig):
    pool_class = PaperPool
    sheets: int = field(default=1)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points as an installed package would have them, of a module `paper_plugin`."""
    module = types.ModuleType("paper_plugin")
    module.PaperPoolConfig = PaperPoolConfig  # type: ignore[attr-defined]
    module.PaperKernels = PaperKernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paper_plugin", module)
    points = [
        metadata.EntryPoint("paper", "paper_plugin:PaperPoolConfig", registry.POOL_GROUP),
        metadata.EntryPoint("unified", "paper_plugin:PaperPoolConfig", registry.POOL_GROUP),
        metadata.EntryPoint("torn", "paper_plugin:Missing", registry.POOL_GROUP),
        metadata.EntryPoint("paper", "paper_plugin:PaperKernels", registry.KERNEL_GROUP),
    ]
    monkeypatch.setattr(
        registry.metadata, "entry_points", lambda *, group: [p for p in points if p.group == group]
    )


class PaperKernels:
    name: ClassVar[str] = "paper"


def test_the_built_in_families_have_names_and_classes() -> None:
    assert registry.pool_names()[:2] == ("unified", "three-pool")
    assert registry.pool_config_class("unified") is UnifiedPoolConfig
    assert registry.pool_config_class("three-pool") is ThreePoolConfig
    assert registry.pool_name(ThreePoolConfig) == "three-pool"


def test_the_type_of_the_config_chooses_the_pool() -> None:
    for config_type, name in ((UnifiedPoolConfig, "UnifiedPool"), (ThreePoolConfig, "ThreePool")):
        config = config_type(max_requests=1, max_context=1)
        assert registry.pool_class(config).__name__ == name
        assert registry.pool_class(config_type) is registry.pool_class(config)


def test_a_foreign_config_class_needs_no_registration_to_choose_its_pool() -> None:
    assert registry.pool_class(PaperPoolConfig(max_requests=1, max_context=1)) is PaperPool
    with pytest.raises(ConfigError, match="pool config PoolConfig: chooses no pool; use Unified"):
        registry.pool_class(PoolConfig)


def test_a_foreign_config_without_a_name_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PaperPoolConfig: has no name.*group dsv4\.pools"):
        PaperPoolConfig(max_requests=1, max_context=1).dump(tmp_path / "pool.toml")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("plugins")
def test_a_registered_pool_is_loaded_and_saved_by_its_name(tmp_path: Path) -> None:
    backend = BackendConfig(pool=PaperPoolConfig(max_requests=1, max_context=1, sheets=3))
    backend.dump(tmp_path / "backend.toml")
    assert 'type = "paper"' in (tmp_path / "backend.toml").read_text()
    assert BackendConfig.load(tmp_path / "backend.toml") == backend


@pytest.mark.usefixtures("plugins")
def test_a_plug_in_cannot_take_a_built_in_name() -> None:
    assert registry.pool_names() == ("unified", "three-pool", "paper", "torn")
    assert registry.pool_config_class("unified") is UnifiedPoolConfig


@pytest.mark.usefixtures("plugins")
def test_a_broken_plug_in_is_named_and_only_when_asked_for() -> None:
    assert registry.pool_config_class("paper") is PaperPoolConfig
    assert registry.pool_name(PaperPoolConfig) == "paper"
    with pytest.raises(ConfigError, match="torn: paper_plugin:Missing cannot be imported"):
        registry.pool_config_class("torn")


@pytest.mark.usefixtures("plugins")
def test_kernel_sets_are_found_by_name() -> None:
    assert registry.kernel_set_names()[0] == "torch"
    assert registry.kernel_set_names()[-1] == "paper"
    assert registry.kernel_family("paper") is PaperKernels
    assert registry.kernel_family("torch").name == "torch"


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        KernelError, match=r"'toch': must be one of torch.*nearest known name: 'torch'"
    ):
        registry.kernel_family("toch")
    with pytest.raises(
        ConfigError, match=r"'threepool': must be one of unified, three-pool.*'three-pool'"
    ):
        registry.pool_config_class("threepool")


def test_importing_the_config_loads_no_tensor_library_and_prints_nothing() -> None:
    script = "import sys, dsv4.config; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_events_are_silent_until_a_handler_asks_and_reach_structlog_captures(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = get_logger("dsv4.silent")
    log.info("row_stored", row=3)
    assert capfd.readouterr() == ("", "")
    with structlog.testing.capture_logs() as events:
        log.info("row_stored", row=3)
    assert events == [{"event": "row_stored", "row": 3, "log_level": "info"}]
