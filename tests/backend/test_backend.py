"""Backend: composition, exact memory estimates, clear refusals."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import attrs
import pytest
import torch

import dsv4
from dsv4.errors import BatchError, ConfigError, KernelError
from dsv4.metadata.base import MetadataBuilder
from dsv4.metadata.table_builder import TableMetadataBuilder
from dsv4.model.decoder import Decoder
from dsv4.model.model import Model
from dsv4.pool.three_pool import ThreePool
from dsv4.pool.unified import UnifiedPool

POOLS = (dsv4.UnifiedPoolConfig, dsv4.ThreePoolConfig)


@pytest.fixture
def model(golden: Path) -> dsv4.ModelConfig:
    return dsv4.ModelConfig.from_json(golden / "tiny" / "config.json")


def storage_nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(("config", "pool"), [(POOLS[0], UnifiedPool), (POOLS[1], ThreePool)])
def test_the_type_of_the_pool_config_chooses_the_pool(model, config, pool):
    backend = dsv4.Backend.create(model, config(max_requests=2, max_context=64))
    assert type(backend.pool) is pool


class ForeignBuilder(MetadataBuilder):
    """Has what MetadataBuilder promises, and nothing else."""

    def __init__(self, pool, config, fill=None):
        self._inner = TableMetadataBuilder(pool, config, fill)
        self._extra = torch.empty(5, dtype=torch.uint8)
        self.metadata, self.computed = self._inner.metadata, self._inner.computed

    @classmethod
    def estimate(cls, model, geometry, config):
        return {"extra": 5, **TableMetadataBuilder.estimate(model, geometry, config)}

    def prepare(self, batch):
        self._inner.prepare(batch)

    def fill(self):
        return self._inner.fill()

    def advance(self, accepted_B):
        self._inner.advance(accepted_B)

    def swa_loc_for(self, batch):
        return self._inner.swa_loc_for(batch)

    def nbytes(self):
        return {"extra": 5, **self._inner.nbytes()}


class ForeignlyFilledPool(UnifiedPool):
    @classmethod
    def builder_class(cls):
        return ForeignBuilder


@attrs.frozen(kw_only=True)
class ForeignlyFilledConfig(dsv4.UnifiedPoolConfig):
    pool_class = ForeignlyFilledPool


def test_a_builder_of_another_package_serves_estimate_and_decoding(model):
    logits, estimates = [], []
    decoder = Decoder(model)
    torch.manual_seed(0)
    for tensor in decoder.official_tensors().values():
        if tensor.view.is_floating_point():
            tensor.view.normal_(0, 0.2)
    for pool_config in (POOLS[0], ForeignlyFilledConfig):
        pool = pool_config(max_requests=1, max_context=64)
        backend = dsv4.Backend.create(model, pool, max_batch_tokens=8)
        estimates.append(dsv4.Backend.estimate(model, backend.config).total)
        slot = backend.pool.acquire()
        backend.pool.reserve(slot, 8)
        loaded = Model(config=model, decoder=decoder, backend=backend)
        logits.append(loaded.forward(dsv4.ForwardBatch.of([(slot, range(8))]), rows="all"))
    assert type(backend.builder) is ForeignBuilder
    assert torch.equal(*logits)
    assert logits[0].std() > 0.01
    assert estimates[1] == estimates[0] + 5


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_format": "fp8", "index_format": "fp4", "in_place_tokens": 5},
        {"row_format": "bf16", "num_pages": 3, "max_context": 1000},
    ],
)
def test_the_estimate_is_the_sum_of_all_tensors_exactly(model, pool, options):
    config = dsv4.BackendConfig(
        pool=pool(**({"max_requests": 3, "max_context": 300} | options)),
        max_batch_tokens=70,
        score_budget_bytes=2000,
    )
    report = dsv4.Backend.estimate(model, config)
    backend = dsv4.Backend.from_config(model, config)
    pool_nbytes = storage_nbytes(list(backend.pool.tensors.values()))
    assert report.total == pool_nbytes + sum(backend.builder.nbytes().values())


def test_nothing_grows_with_the_number_of_decoded_tokens(model):
    backend = dsv4.Backend.create(
        model, dsv4.UnifiedPoolConfig(max_requests=1, max_context=600), max_batch_tokens=8
    )
    decoder = Decoder(model)
    slot = backend.pool.acquire()
    backend.pool.reserve(slot, 600)

    def decode(num_tokens: int) -> None:
        with torch.inference_mode():
            for _ in range(num_tokens):
                backend.builder.prepare(dsv4.ForwardBatch.of([(slot, [7])]))
                decoder(backend.builder.metadata, backend.builder.fill(), backend.kernels)
                backend.pool.commit(slot, 1)

    def held() -> int:
        """Bytes of every tensor that anything in this process still refers to."""
        gc.collect()
        return storage_nbytes([x for x in gc.get_objects() if type(x) is torch.Tensor])

    # both counts behind a closing window of every ratio, in one granule of the batch shape
    decode(288)
    before = held()
    decode(192)
    assert held() == before
    decode(40)
    # remembered views: one per name and shape, and shapes change once in 256 tokens
    assert len(backend.builder._buffers._views) < 300


def test_an_unknown_kernel_set_is_refused_by_name(model):
    with pytest.raises(KernelError, match="trtion"):
        dsv4.Backend.create(
            model, dsv4.UnifiedPoolConfig(max_requests=1, max_context=64), kernels="trtion"
        )


def test_an_override_of_an_unknown_op_names_the_known_ones(model):
    with pytest.raises(ConfigError, match="attend"):
        dsv4.Backend.create(
            model,
            dsv4.UnifiedPoolConfig(max_requests=1, max_context=64),
            overrides={"atend": "torch"},
        )


def test_a_single_op_can_be_overridden(model):
    backend = dsv4.Backend.create(
        model,
        dsv4.UnifiedPoolConfig(max_requests=1, max_context=64),
        overrides={"attend": "torch"},
    )
    assert type(backend.kernels.attend).__name__ == "TorchAttention"


def test_a_device_that_is_not_there_is_one_clear_error(model):
    with pytest.raises(ConfigError, match="cpu"):
        dsv4.Backend.create(
            model, dsv4.UnifiedPoolConfig(max_requests=1, max_context=64), device="cuda:99"
        )


def test_a_batch_above_the_capacity_names_the_knob(model):
    backend = dsv4.Backend.create(
        model, dsv4.UnifiedPoolConfig(max_requests=2, max_context=64), max_batch_tokens=4
    )
    slot = backend.pool.acquire()
    backend.pool.reserve(slot, 64)
    with pytest.raises(BatchError, match="max_batch_tokens"):
        backend.builder.prepare(dsv4.ForwardBatch.of([(slot, [1] * 5)]))


def test_token_ids_outside_the_vocabulary_are_refused(model):
    backend = dsv4.Backend.create(model, dsv4.UnifiedPoolConfig(max_requests=2, max_context=64))
    slot = backend.pool.acquire()
    backend.pool.reserve(slot, 64)
    for bad in (-1, model.vocab_size):
        with pytest.raises(BatchError, match=str(model.vocab_size)):
            backend.builder.prepare(dsv4.ForwardBatch.of([(slot, [bad])]))


def test_every_public_name_is_importable():
    for name in dsv4.__all__:
        assert getattr(dsv4, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = dsv4.nothing


def test_a_backend_config_file_composes_the_same_backend(model, tmp_path):
    config = dsv4.BackendConfig(pool=dsv4.ThreePoolConfig(max_requests=2, max_context=128))
    config.dump(tmp_path / "backend.json")
    assert json.loads((tmp_path / "backend.json").read_text())["pool"]["type"] == "three-pool"
    loaded = dsv4.BackendConfig.load(tmp_path / "backend.json")
    assert type(dsv4.Backend.from_config(model, loaded).pool) is ThreePool
