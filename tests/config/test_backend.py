"""Pool, backend and engine configs, their files, and the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from dsv4.config import (
    BackendConfig,
    EngineConfig,
    ModelConfig,
    PoolConfig,
    ThreePoolConfig,
    UnifiedPoolConfig,
    checks_enabled,
    kernels_from_env,
)
from dsv4.errors import ConfigError
from dsv4.pool.geometry import PoolGeometry
from tests.config.documents import (
    changed,
    official,
)


def test_a_page_is_the_smallest_multiple_of_every_ratio_from_256_on() -> None:
    pool = UnifiedPoolConfig(max_requests=3, max_context=1000)
    expected = {(4, 128): 256, (4, 96): 288, (7,): 259, (300, 4): 300, (): 256}
    for ratios, page_tokens in expected.items():
        table = [*ratios, 0]
        document = changed(
            official("tiny"), n_layers=len(table), n_hash_layers=0, compress_ratios=table
        )
        resolved = pool.resolved(ModelConfig.from_json(document))
        assert resolved.page_tokens == page_tokens
        assert resolved.num_pages == 3 * -(-1000 // page_tokens)


def test_a_page_that_is_no_multiple_of_every_ratio_raises() -> None:
    pool = ThreePoolConfig(max_requests=1, max_context=1, page_tokens=36)
    with pytest.raises(ConfigError, match=r"page_tokens 36: .* every ratio 4, 32; use 64"):
        pool.resolved(ModelConfig.preset("tiny"))
    assert attrs.evolve(pool, page_tokens=32).resolved(ModelConfig.preset("tiny")).num_pages == 1


def test_automatic_formats_follow_the_dtype_and_explicit_ones_stay() -> None:
    pool = UnifiedPoolConfig(max_requests=1, max_context=1)
    tiny, flash = ModelConfig.preset("tiny"), ModelConfig.preset("flash")
    assert (pool.resolved(tiny).row_format, pool.resolved(tiny).index_format) == ("fp32", "fp32")
    assert (pool.resolved(flash).row_format, pool.resolved(flash).index_format) == ("bf16", "bf16")
    chosen = attrs.evolve(pool, row_format="fp8", index_format="fp4").resolved(flash)
    assert (chosen.row_format, chosen.index_format) == ("fp8", "fp4")


def test_resolving_keeps_the_type_and_changes_nothing_twice() -> None:
    model = ModelConfig.preset("tiny")
    once = ThreePoolConfig(max_requests=2, max_context=7, num_pages=1, in_place_tokens=4).resolved(
        model
    )
    assert type(once) is ThreePoolConfig
    assert once == once.resolved(model)
    assert once.num_pages == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 0}, "max_context 0: must be at least 1"),
        ({"max_requests": 0}, "max_requests 0"),
        ({"in_place_tokens": 0}, "in_place_tokens 0"),
        ({"num_pages": 0}, "num_pages 0"),
        ({"max_requests": True}, "max_requests True: must be an integer"),
        ({"row_format": "fp4"}, "row_format 'fp4': must be one of 'auto', 'fp32', 'bf16', 'fp8'"),
        ({"index_format": "int8"}, "index_format 'int8'"),
    ],
)
def test_a_pool_value_out_of_range_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UnifiedPoolConfig(**({"max_requests": 1, "max_context": 1} | changes))


@pytest.mark.parametrize("tokens", [1, 4, 12])
def test_a_ring_too_small_for_the_tokens_in_place_raises(tokens: int) -> None:
    sizes = {
        "max_requests": 1, "window": 16, "in_place_tokens": tokens,
        "page_tokens": 32, "pages_per_slot": 1, "num_pages": 1,
    }  # fmt: skip
    need = 16 + tokens - 1
    assert PoolGeometry(ring_rows=need, **sizes).window_rows == need
    with pytest.raises(ConfigError, match=f"ring_rows {need - 1}: .*at least {need} rows; raise"):
        PoolGeometry(ring_rows=need - 1, **sizes)


POOL = UnifiedPoolConfig(max_requests=8, max_context=65_536, row_format="fp8", in_place_tokens=4)
BACKEND = BackendConfig(
    pool=POOL,
    kernels="torch",
    overrides={"attend": "torch", 'odd "name"\x7f\n': "ü"},
    max_batch_requests=4,
    deterministic=True,
)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize(
    "config",
    [
        POOL,
        ThreePoolConfig(max_requests=1, max_context=5, num_pages=3, page_tokens=512),
        BACKEND,
        BackendConfig(pool=POOL),
        EngineConfig(backend=BACKEND, chunk_tokens=17),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_dumped_config_loads_equal(
    tmp_path: Path, suffix: str, config: PoolConfig | BackendConfig | EngineConfig
) -> None:
    path = tmp_path / f"config{suffix}"
    config.dump(path)
    loaded = type(config).load(path)
    assert loaded == config
    assert hash(loaded) == hash(config)


def test_a_pool_file_loads_as_the_family_that_it_names(tmp_path: Path) -> None:
    POOL.dump(tmp_path / "pool.toml")
    assert PoolConfig.load(tmp_path / "pool.toml") == POOL
    with pytest.raises(
        ConfigError, match="type 'unified' is a UnifiedPoolConfig, wanted ThreePool"
    ):
        ThreePoolConfig.load(tmp_path / "pool.toml")


def test_a_hand_written_toml_file_gives_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "backend.toml"
    path.write_text('[pool]\ntype = "three-pool"\nmax_requests = 2\nmax_context = 100\n')
    backend = BackendConfig.load(path)
    assert backend == BackendConfig(pool=ThreePoolConfig(max_requests=2, max_context=100))
    assert (backend.max_batch_tokens, backend.score_budget_bytes) == (2048, 67_108_864)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_token = 1\n", r"'max_batch_token' \(nearest known name: 'max_batch_tokens'\)"),
        (
            '[pool]\ntype = "unified"\nmax_contxt = 1',
            "pool: unknown key 'max_contxt' .*'max_context'",
        ),
        ('[pool]\ntype = "unifed"', "pool type 'unifed': must be one of unified, three-pool"),
        ("[pool]\nmax_requests = 1", "missing key 'type'; add it, one of unified, three-pool"),
        ('[pool]\ntype = "unified"', "pool: missing key 'max_requests', 'max_context'"),
        ("kernels = 'torch'", "missing key 'pool'"),
        ("pool = 3", "pool 3: must be a table"),
        ("pool = ", "not TOML"),
    ],
)
def test_a_bad_file_raises_with_the_place_and_the_nearest_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "backend.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        BackendConfig.load(path)


def test_a_file_of_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"suffix '.yaml': must be .toml or .json"):
        POOL.dump(tmp_path / "pool.yaml")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="No such file"):
        PoolConfig.load(tmp_path / "pool.toml")


def test_backend_and_engine_limits_are_checked_against_what_they_contain() -> None:
    with pytest.raises(ConfigError, match="max_batch_requests 9: the pool has max_requests 8"):
        BackendConfig(pool=POOL, max_batch_requests=9)
    with pytest.raises(ConfigError, match=r"chunk_tokens 4096: .* max_batch_tokens 2048"):
        EngineConfig(backend=BACKEND, chunk_tokens=4096)
    with pytest.raises(ConfigError, match="must be a PoolConfig"):
        BackendConfig(pool="unified")
    with pytest.raises(ConfigError, match=r"overrides .* must map names to names"):
        BackendConfig(pool=POOL, overrides={"attend": 1})


def test_a_resolved_engine_has_no_open_default() -> None:
    engine = EngineConfig(backend=BackendConfig(pool=POOL)).resolved(ModelConfig.preset("flash"))
    assert engine.chunk_tokens == 2048
    assert engine.backend.max_batch_requests == 8
    assert engine.backend.pool == POOL.resolved(ModelConfig.preset("flash"))


# the environment


def test_the_environment_fills_auto_and_an_explicit_choice_wins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DSV4_KERNELS", raising=False)
    assert kernels_from_env() == "auto"
    monkeypatch.setenv("DSV4_KERNELS", "torch")
    assert kernels_from_env("mine") == "mine"
    with caplog.at_level("INFO", logger="dsv4"):
        assert kernels_from_env("auto") == "torch"
    assert "kernels_from_environment" in caplog.text


def test_a_bad_environment_value_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_KERNELS", "trition")
    with pytest.raises(ConfigError, match="DSV4_KERNELS 'trition': must be one of auto, torch"):
        kernels_from_env()
    monkeypatch.setenv("DSV4_CHECK", "yes")
    with pytest.raises(ConfigError, match="DSV4_CHECK 'yes': must be 0 or 1"):
        checks_enabled()


def test_checks_are_on_only_for_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4_CHECK", raising=False)
    assert not checks_enabled()
    for value, expected in (("0", False), ("1", True), ("", False)):
        monkeypatch.setenv("DSV4_CHECK", value)
        assert checks_enabled() is expected
