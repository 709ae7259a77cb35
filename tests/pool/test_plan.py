"""Memory before it is allocated: exact, and consistent with what then fits."""

import math

import attrs
import pytest
import torch

from dsv4.config import ModelConfig, PoolConfig, ThreePoolConfig, UnifiedPoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.plan import fits, largest_context, most_requests
from dsv4.pool.tables import TablePool
from dsv4.pool.unified import UnifiedPool
from tests.pool.sequences import CONFIGS, FAMILIES, small_model

families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("rows", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("keys", ["fp32", "bf16", "fp8", "fp4"])
@pytest.mark.parametrize("margin", [1, 5])
def test_an_estimate_is_the_bytes_of_all_tensors(
    family: type[TablePool], rows: str, keys: str, margin: int
) -> None:
    config = CONFIGS[family](
        max_requests=3, max_context=500, row_format=rows, index_format=keys, in_place_tokens=margin
    )
    for model in (small_model(), small_model((0, 0), drafts=0), small_model((3, 6), csa=3)):
        report = family.estimate(config, model)
        pool = family(config, model)
        assert report.components == {
            name: tensor.numel() * tensor.element_size() for name, tensor in pool.tensors.items()
        }
        assert report.total == sum(report.components.values())
        held = {component.table: component.nbytes for component in pool.components()}
        assert report.components == held


@families
def test_an_estimate_of_a_released_model_allocates_nothing(
    family: type[TablePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch, "zeros", refuse)
    config = CONFIGS[family](max_requests=64, max_context=1_000_000, row_format="fp8")
    assert family.estimate(config, ModelConfig.preset("pro")).total > 2**37


# By hand, for Flash without its draft layer, bf16 rows and keys, D = 1.
WINDOW = 43 * 128 * 1024
CSA_STATE = 21 * 8 * 4 * 4 * (512 + 128)
HCA_STATE = 20 * 4 * (3 * 512 + 1 + 2 * 512)
BOOKS = 4 + 4 * (65_536 // 256)
ENTRIES = 21 * (1024 + 256) / 4 + 20 * 1024 / 128


@families
def test_a_flash_slot_and_token_cost_what_the_hand_table_says(family: type[TablePool]) -> None:
    model = ModelConfig.preset("flash").without_drafts()
    report = family.estimate(CONFIGS[family](max_requests=8, max_context=65_536), model)
    assert report.bytes_per_slot == WINDOW + CSA_STATE + HCA_STATE + BOOKS
    assert report.bytes_per_slot == pytest.approx(7.6e6, rel=0.01)
    assert report.bytes_per_token == ENTRIES == 6880
    slots = 8 * (report.bytes_per_slot + 65_536 * report.bytes_per_token)
    assert report.total == slots


@families
def test_packed_rows_cost_584_bytes_and_their_planes_pad(family: type[TablePool]) -> None:
    model = ModelConfig.preset("flash").without_drafts()
    config = CONFIGS[family](
        max_requests=64, max_context=65_536, row_format="fp8", index_format="fp4"
    )
    report = family.estimate(config, model)
    unpadded = 21 * (584 + 68) / 4 + 20 * 584 / 128
    # A plane of 64 rows pads 64 * 584 to 65 * 576 bytes.
    padded = 21 * (585 + 68) / 4 + 20 * 585 / 128
    assert unpadded < report.bytes_per_token == pytest.approx(padded, rel=1e-6)


@families
@pytest.mark.parametrize("budget", [300_000, 1_000_000, 5_000_000])
@pytest.mark.parametrize("rows", ["fp32", "fp8"])
def test_one_more_than_what_fits_does_not_fit(
    family: type[TablePool], budget: int, rows: str
) -> None:
    config = CONFIGS[family](max_requests=3, max_context=100, row_format=rows)
    model = attrs.evolve(small_model(), max_position_embeddings=10**7)

    def nbytes(changed: PoolConfig) -> int:
        return family.estimate(changed, model).total

    wide = largest_context(family, config, model, budget_nbytes=budget)
    assert wide is not None
    assert wide.max_requests == 3
    assert wide.nbytes == nbytes(attrs.evolve(config, max_context=wide.max_context)) <= budget
    assert nbytes(attrs.evolve(config, max_context=wide.max_context + 1)) > budget
    many = most_requests(family, config, model, budget_nbytes=budget)
    assert many is not None
    assert many.max_context == 100
    assert many.nbytes == nbytes(attrs.evolve(config, max_requests=many.max_requests)) <= budget
    assert nbytes(attrs.evolve(config, max_requests=many.max_requests + 1)) > budget


@families
def test_what_does_not_fit_at_all_is_none(family: type[TablePool]) -> None:
    config, model = CONFIGS[family](max_requests=3, max_context=100), small_model()
    assert largest_context(family, config, model, budget_nbytes=1_000) is None
    assert most_requests(family, config, model, budget_nbytes=1_000) is None
    assert fits(family, config, model, budget_nbytes=1_000) == ()


@families
def test_a_budget_beyond_all_addresses_ends_the_list(family: type[TablePool]) -> None:
    config, model = CONFIGS[family](max_requests=3, max_context=1), small_model((0,), drafts=0)
    found = fits(family, config, model, budget_nbytes=10**18)
    # 16 window rows per slot: 2^27 slots would need row 2^31 - 1.
    assert found[-1].max_requests == 2**26


@families
def test_context_stops_at_what_the_model_was_made_for(family: type[TablePool]) -> None:
    config = CONFIGS[family](max_requests=1, max_context=100)
    model = attrs.evolve(small_model(), max_position_embeddings=777)
    fit = largest_context(family, config, model, budget_nbytes=2**40)
    assert fit is not None
    assert fit.max_context == 777


@families
def test_fits_lists_doubling_numbers_of_slots_and_what_each_can_reach(
    family: type[TablePool],
) -> None:
    config, model = CONFIGS[family](max_requests=3, max_context=1), small_model()
    found = fits(family, config, model, budget_nbytes=1_000_000)
    assert [fit.max_requests for fit in found] == [2**step for step in range(len(found))]
    contexts = [fit.max_context for fit in found]
    assert contexts == sorted(contexts, reverse=True)
    assert all(fit.nbytes <= 1_000_000 for fit in found)
    more = CONFIGS[family](max_requests=2 ** len(found), max_context=1)
    assert family.estimate(more, model).total > 1_000_000


def test_bytes_beside_the_pool_count_too() -> None:
    config, model = UnifiedPoolConfig(max_requests=1, max_context=100), small_model()
    plain = most_requests(UnifiedPool, config, model, budget_nbytes=1_000_000)
    loaded = most_requests(
        UnifiedPool,
        config,
        model,
        budget_nbytes=1_000_000,
        extra_nbytes=lambda config: 50_000 * config.max_requests,
    )
    assert plain is not None
    assert loaded is not None
    assert loaded.max_requests < plain.max_requests
    changed = attrs.evolve(config, max_requests=loaded.max_requests)
    pool_nbytes = UnifiedPool.estimate(changed, model).total
    assert loaded.nbytes == pool_nbytes + 50_000 * loaded.max_requests


def test_a_wrong_config_is_an_error_and_not_a_lack_of_memory() -> None:
    config = ThreePoolConfig(max_requests=1, max_context=100, page_tokens=33)
    with pytest.raises(ConfigError, match="page_tokens 33"):
        most_requests(UnifiedPool, config, small_model(), budget_nbytes=10**9)


@families
def test_slots_cost_the_same_whatever_the_context(family: type[TablePool]) -> None:
    costs = set()
    for max_context in (1_000, 64_000):
        config = CONFIGS[family](max_requests=4, max_context=max_context)
        report = family.estimate(config, small_model())
        pages = math.ceil(max_context / 256)
        costs.add(report.bytes_per_slot - 4 * pages)
    assert len(costs) == 1
