"""Implementations with one fault each: `test_suites_notice.py` wants the suites to fail on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4.config import PoolConfig, UnifiedPoolConfig
from dsv4.kernels.attend_ref import TorchAttention
from dsv4.kernels.compress_ref import TorchCompress
from dsv4.kernels.experts_ref import TorchExperts
from dsv4.kernels.linear_ref import TiledLinear, TorchLinear
from dsv4.kernels.mix_ref import TorchMix
from dsv4.kernels.norm_ref import TorchNorm
from dsv4.kernels.score_ref import TorchScore
from dsv4.kernels.select_ref import TorchSelect
from dsv4.kernels.store_ref import TorchStore
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.unified import UnifiedMetadataBuilder
from dsv4.pool.base import KVView, MemoryReport
from dsv4.pool.unified import UnifiedPool
from dsv4.testing import (
    AttentionConformance,
    CompressConformance,
    ExpertsConformance,
    KVPoolConformance,
    LinearConformance,
    MetadataBuilderConformance,
    MixConformance,
    NormConformance,
    ScoreConformance,
    SelectConformance,
    StoreConformance,
)


def config_of(pool: type[UnifiedPool]) -> type[PoolConfig]:
    """A config class that chooses the pool."""
    return attrs.frozen(kw_only=True)(
        type("FaultyConfig", (UnifiedPoolConfig,), {"pool_class": pool})
    )


class GivesPool:
    pool: type[UnifiedPool]

    @pytest.fixture
    def pool_config_type(self) -> type[PoolConfig]:
        return config_of(self.pool)


class Forgetful(UnifiedPool):
    """A new owner finds the old one's accumulators."""

    def acquire(self) -> int:
        parts, self._parts = self._parts, []
        slot = super().acquire()
        self._parts = parts
        return slot


class TestForgetful(GivesPool, KVPoolConformance):
    pool = Forgetful


class HalfFork(UnifiedPool):
    """A fork gets the first component alone."""

    def fork(self, src: int) -> int:
        parts, self._parts = self._parts, self._parts[:1]
        slot = super().fork(src)
        self._parts = parts
        return slot


class TestHalfFork(GivesPool, KVPoolConformance):
    pool = HalfFork


class Generous(UnifiedPool):
    """Rolls back any number of tokens."""

    def rollback(self, slot: int, length: int) -> None:
        if 0 <= length <= self.length(slot):
            self._books[slot].length = length
            self._set_length(slot, length)
        else:
            super().rollback(slot, length)


class TestGenerous(GivesPool, KVPoolConformance):
    pool = Generous


class Leaky(UnifiedPool):
    """Takes what it can before it notices that there is not enough, and estimates too little."""

    def reserve(self, slot: int, total_tokens: int) -> None:
        missing = self._pages_for(total_tokens) - len(self._books[slot].pages)
        if missing > self.num_free_pages:
            self._append_pages(slot, self._pages.allocate(self.num_free_pages, purpose="leak"))
        super().reserve(slot, total_tokens)

    @classmethod
    def estimate(cls, config: Any, model: Any) -> MemoryReport:
        report = super().estimate(config, model)
        return attrs.evolve(report, components={**report.components, "lengths": 0})


class TestLeaky(GivesPool, KVPoolConformance):
    pool = Leaky


class StaleBuilder(UnifiedMetadataBuilder):
    """Judges freshness by shape, and lets fill move a length."""

    def swa_loc_for(self, batch: ForwardBatch | None) -> Tensor:
        same = batch is not None and batch.num_tokens == self.metadata.shape.num_tokens
        return self.metadata.swa_loc_T if same else super().swa_loc_for(batch)

    def fill(self) -> Any:
        epoch = super().fill()
        self._pool.lengths[0] += 1
        return epoch


class StalePool(UnifiedPool):
    @classmethod
    def builder_class(cls) -> type[StaleBuilder]:
        return StaleBuilder


class TestStale(GivesPool, MetadataBuilderConformance):
    pool = StalePool


class GivesKernel:
    op: object

    @pytest.fixture
    def kernel(self) -> object:
        return self.op


class UnroundedFresh(TorchStore):
    """Chunk tokens are read as they were before the row format rounded them; -1 counts from the end."""

    def store(self, q_THD: Tensor, kv_TD: Tensor, **options: Any) -> Tensor:
        out = super().store(q_THD, kv_TD, **options)
        if options["fresh_TD"] is not None:
            options["fresh_TD"].add_(1e-3)
        return out

    def store_tail(self, fresh_TD: Tensor, *, tail_loc_T: Tensor, view: KVView) -> None:
        super().store_tail(fresh_TD, tail_loc_T=tail_loc_T % view.num_rows, view=view)


class TestUnroundedFresh(GivesKernel, StoreConformance):
    op = UnroundedFresh()


class EagerState(TorchCompress):
    """Writes the state before it reads it, and entries wherever they are clamped to."""

    def overlap(self, projected_TC: Tensor, **options: Any) -> None:
        target, plan = options["target"], options["plan"]
        rows = projected_TC.clone()
        rows[:, options["ape_MC"].shape[1] :] += options["ape_MC"][plan.ape_row_T.long()]
        target.state_view.write(plan.state_loc_T, rows)
        super().overlap(projected_TC, **options)

    def fold(self, projected_TC: Tensor, **options: Any) -> None:
        target = options["target"]
        loc_E = target.entry_loc_E.clamp(0, target.entry_view.num_rows - 1)
        options["target"] = attrs.evolve(target, entry_loc_E=loc_E)
        super().fold(projected_TC, **options)


class TestEagerState(GivesKernel, CompressConformance):
    op = EagerState()


class OpenScore(TorchScore):
    """Shows one entry too many."""

    def score(self, q_THD: Tensor, weights_TH: Tensor, inputs: Any, **options: Any) -> None:
        more = attrs.evolve(inputs, num_visible_T=inputs.num_visible_T + 1)
        super().score(q_THD, weights_TH, more, **options)


class TestOpenScore(GivesKernel, ScoreConformance):
    op = OpenScore()


class LateSelect(TorchSelect):
    """The higher entry wins a tie."""

    def select(self, scores_TN: Tensor, *args: Any, **options: Any) -> None:
        nudge_N = torch.arange(scores_TN.shape[1]) * 1e-6
        super().select(scores_TN + nudge_N, *args, **options)


class TestLateSelect(GivesKernel, SelectConformance):
    op = LateSelect()


class TwoSinks(TorchAttention):
    """Counts the sink once per source, and takes -1 for the last row."""

    def attend(self, q_THD: Tensor, sources: Sequence[Any], sink_H: Tensor, **options: Any) -> None:
        wrapped = []
        for source in sources:
            rows = source.stream.indices_N
            rows = torch.where(rows == -1, source.view.num_rows - 1, rows)
            stream = attrs.evolve(source.stream, indices_N=rows)
            wrapped.append(attrs.evolve(source, stream=stream))
        more = sink_H + torch.tensor(float(len(sources))).log()
        super().attend(q_THD, wrapped, more, **options)


class TestTwoSinks(GivesKernel, AttentionConformance):
    op = TwoSinks()


class BoastfulLinear(TorchLinear):
    row_invariant = True


class TestBoastfulLinear(GivesKernel, LinearConformance):
    op = BoastfulLinear()


class ShortMix(TorchMix):
    """Adds eps to the statistics alone."""

    def pre(self, streams_TND: Tensor, weights: Any, **options: Any) -> tuple[Tensor, ...]:
        return super().pre(streams_TND, weights, **{**options, "hc_eps": 0.0})


class TestShortMix(GivesKernel, MixConformance):
    op = ShortMix(TiledLinear())


class CastFirst(TorchNorm):
    """Rounds before the weight is multiplied."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().norm(x, torch.ones_like(weight), eps) * weight.to(x.dtype)


class TestCastFirst(GivesKernel, NormConformance):
    op = CastFirst()


class UnclampedExperts(TorchExperts):
    def experts(self, *args: Any, limit: float) -> Tensor:
        return super().experts(*args, limit=0.0)


class TestUnclampedExperts(GivesKernel, ExpertsConformance):
    op = UnclampedExperts(TiledLinear())
