"""An installed plug-in, found through its entry points, runs through the same suites unchanged and decodes the bits of
our pools."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsv4 import Backend, UnifiedPoolConfig, registry
from dsv4.config import BackendConfig, ModelConfig, PoolConfig
from dsv4.errors import KernelError
from dsv4.kernels.base import SelectKernel
from dsv4.metadata.batch import ForwardBatch
from dsv4.model.decoder import Decoder
from dsv4.model.model import Model
from dsv4.testing import KVPoolConformance, MetadataBuilderConformance, SelectConformance
from dsv4.testing.models import small_model

HERE = Path(__file__).resolve().parent
ENTRY_POINTS = """\
[dsv4.pools]
entries-first = installed_pool:EntriesFirstConfig
[dsv4.kernels]
paper = installed_kernels:PaperKernels
"""


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A site-packages folder as pip leaves it: the example's pool, a kernel set, and their dist-info."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(HERE.parents[1] / "examples" / "custom_pool.py", site / "installed_pool.py")
    shutil.copy(HERE / "paper_kernels.py", site / "installed_kernels.py")
    info = site / "plug_in-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    for name in ("installed_pool", "installed_kernels"):
        sys.modules.pop(name, None)


class TestInstalledPool(KVPoolConformance, MetadataBuilderConformance):
    @pytest.fixture
    def pool_config_type(self) -> type[PoolConfig]:
        return registry.pool_config_class("entries-first")


class TestInstalledSelect(SelectConformance):
    @pytest.fixture
    def kernel(self) -> SelectKernel:
        return registry.kernel_family("paper").build(deterministic=True).select


def test_plug_ins_stand_beside_the_built_in_parts() -> None:
    assert registry.pool_names() == ("unified", "three-pool", "entries-first")
    assert "paper" in registry.kernel_set_names()


def test_a_plug_in_pool_is_named_in_files(tmp_path: Path) -> None:
    config_type = registry.pool_config_class("entries-first")
    config = BackendConfig(pool=config_type(max_requests=2, max_context=64))
    config.dump(tmp_path / "backend.toml")
    assert 'type = "entries-first"' in (tmp_path / "backend.toml").read_text()
    assert BackendConfig.load(tmp_path / "backend.toml") == config


def test_a_plug_in_set_says_why_it_cannot_run() -> None:
    reason = registry.kernel_family("paper").why_not(
        torch.device("cuda"), small_model(), UnifiedPoolConfig(max_requests=1, max_context=1)
    )
    assert reason == "paper cannot be pushed into a GPU"
    with pytest.raises(KernelError, match=r"kernels 'papier': must be one of .*nearest.*'paper'"):
        registry.kernel_family("papier")


def test_a_plug_in_pool_and_kernels_decode_the_bits_of_ours(golden: Path) -> None:
    config = ModelConfig.from_json(golden / "tiny" / "config_official_style.json").without_drafts()
    torch.manual_seed(3)
    decoder = Decoder(config)
    with torch.no_grad():
        for tensor in decoder.official_tensors().values():
            if tensor.view.is_floating_point() and tensor.view.dim() > 1:
                tensor.view.normal_(0, 0.2)
    ours = _logits(decoder, config, UnifiedPoolConfig, "torch")
    theirs = _logits(decoder, config, registry.pool_config_class("entries-first"), "paper")
    assert torch.equal(ours, theirs)
    assert ours.std() > 0.01


def _logits(
    decoder: Decoder, config: ModelConfig, pool_type: type[PoolConfig], kernels: str
) -> torch.Tensor:
    """A chunk of 37 tokens, then 20 single ones."""
    pool = pool_type(max_requests=2, max_context=128, row_format="bf16")
    backend = Backend.create(config, pool, kernels=kernels, deterministic=True)
    model = Model(config=config, decoder=decoder, backend=backend)
    slot = backend.pool.acquire()
    backend.pool.reserve(slot, 128)
    ids = [(7 * i * i + 3) % config.vocab_size for i in range(57)]
    out = []
    for step in [ids[:37], *([i] for i in ids[37:])]:
        out.append(model.forward(ForwardBatch.of([(slot, step)]), rows="all"))
        backend.pool.commit(slot, len(step))
    return torch.cat(out)
