"""The operations of one forward, one small ABC each, and the kernel set that bundles them.

Legend: T tokens, H heads, D head dim, C projected channels, N entries, K rows or inner width, O outputs, G groups,
M state rows or window tokens, P half the rope width.
Every op writes all lanes of its outputs; index lanes outside a table's rows are no row (design rules 5 and 6).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from dsv4.config import ModelConfig, PoolConfig
from dsv4.metadata.plans import (
    CompressorTarget,
    FoldPlan,
    OverlapPlan,
    RopeTable,
    ScoreInputs,
    SelectOutput,
    Source,
)
from dsv4.pool.base import KVView


class Rounding(enum.Enum):
    """What happens to a vector before it is stored (spec/architecture.md 7.2 and 7.3)."""

    NONE = "none"
    FP8 = "fp8"
    """KV and entries: e4m3 with a power-of-two scale per 64 on the channels that are not rotated."""
    HADAMARD_FP4 = "hadamard_fp4"
    """Indexer queries and keys: Walsh-Hadamard over all channels, then e2m1 per 32."""


class RopeKernel(ABC):
    """1. Rotates interleaved pairs of the last 2 P channels by each token's angle; the others pass unchanged.
    2. `inverse` undoes it. 3. Arithmetic is fp32 (or the input's, if wider); the result has the input's dtype."""

    @abstractmethod
    def rotate(self, x: Tensor, rope: RopeTable, *, inverse: bool = False) -> Tensor:
        """x [T, D] or [T, H, D] -> the same shape."""


class StoreKernel(ABC):
    """1. Queries: per-head RMS norm without weight, then RoPE.
    2. KV: RMSNorm, RoPE, rounding, then the row format's own rounding.
    3. `fresh` holds exactly what reading the stored row gives back.
    4. Rows are written only where loc is a row of the view.
    5. No other byte of the table changes."""

    @abstractmethod
    def store(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        *,
        kv_norm: Tensor,
        eps: float,
        rope: RopeTable,
        store_loc_T: Tensor,
        view: KVView,
        rounding: Rounding,
        fresh_TD: Tensor | None,
    ) -> Tensor:
        """Normed and rotated queries [T, H, D] in q's dtype. `fresh_TD` [T, D] fp32; None where no chunk can occur."""

    @abstractmethod
    def store_tail(self, fresh_TD: Tensor, *, tail_loc_T: Tensor, view: KVView) -> None:
        """Store chunk tokens' fresh rows after attend; bit for bit what an in-place store would have written."""


class CompressKernel(ABC):
    """1. An entry is pooled in token order, so its bits do not depend on how its tokens arrived.
    2. Own tokens come from `projected`, older ones from the state; state is written after it was read.
    3. Entries are normed, rotated at ratio * entry, rounded, and written only where their loc is a row.
    4. Running a forward of at most D tokens a slot twice changes nothing."""

    @abstractmethod
    def overlap(
        self,
        projected_TC: Tensor,
        *,
        ape_MC: Tensor,
        norm: Tensor,
        eps: float,
        plan: OverlapPlan,
        target: CompressorTarget,
        rounding: Rounding,
    ) -> None:
        """CSA: projected = `kv (A | B) | gate (A | B)` fp32; A halves of the previous window, B halves of the own."""

    @abstractmethod
    def fold(
        self,
        projected_TC: Tensor,
        *,
        ape_MC: Tensor,
        norm: Tensor,
        eps: float,
        plan: FoldPlan,
        target: CompressorTarget,
        rounding: Rounding,
    ) -> None:
        """HCA: projected = `kv | gate` fp32; closes windows and advances the accumulators."""


class ScoreKernel(ABC):
    """1. score[t, e] = sum_h w[t, h] * relu(q[t, h] . key[e]) in fp32 for e < n_vis(t). 2. Other lanes are -inf."""

    @abstractmethod
    def round_queries(self, q_THD: Tensor, rounding: Rounding) -> Tensor:
        """Rotated index queries as the scorer reads them, fp32."""

    @abstractmethod
    def score(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        inputs: ScoreInputs,
        *,
        first_token: int,
        out_TN: Tensor,
    ) -> None:
        """Scores of the tokens [first_token, first_token + T) of the forward, fp32 [T, inputs.max_entries]."""


class SelectKernel(ABC):
    """1. Per token, the rows of the min(K, n_vis) best entries, in ascending entry order.
    2. NaN and -inf sort last, the lower entry wins a tie.
    3. Every lane that belongs to the tokens is written, -1 behind a token's picks."""

    @abstractmethod
    def select(
        self, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, *, first_token: int
    ) -> None: ...


class AttentionKernel(ABC):
    """1. One softmax over the rows of all sources. 2. The sink enters the denominator once.
    3. A token without rows: output 0, lse -inf.
    4. An index outside [0, rows + fresh) is no row, whatever its value. 5. Every output lane is written.
    6. A token's result depends on its own rows alone."""

    @abstractmethod
    def attend(
        self,
        q_THD: Tensor,
        sources: Sequence[Source],
        sink_H: Tensor,
        *,
        scale: float,
        out_THD: Tensor,
        lse_TH: Tensor | None = None,
    ) -> None:
        """`lse`: natural log of the sum over keys, without the sink. Scores and accumulation are fp32."""


class LinearKernel(ABC):
    """1. y = x W^T in x's dtype. 2. If `row_invariant`, a row's bits depend on that row alone: not on its place, nor on
    how many rows there are."""

    row_invariant: ClassVar[bool]

    @abstractmethod
    def linear(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor: ...

    @abstractmethod
    def grouped(self, x_TGK: Tensor, weight_GOK: Tensor) -> Tensor:
        """Group g of every token times weight g -> [T, G, O]."""


class MixKernel(ABC):
    """1. Row softmax plus eps, a column step, then iterations - 1 row and column steps, eps added to every sum.
    2. A token's result is a function of its own logits."""

    @abstractmethod
    def sinkhorn(self, logits_TNN: Tensor, *, iterations: int, eps: float) -> Tensor:
        """fp32 [T, N, N] -> doubly stochastic, columns normalised last."""


class ExpertsKernel(ABC):
    """1. y = sum_k w2 cast(p_k * silu(clamped gate) * clamped up) over a token's experts.
    2. The sum is fp32, in ascending expert order."""

    @abstractmethod
    def experts(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        w13_EID: Tensor,
        w2_EDI: Tensor,
        *,
        limit: float,
    ) -> Tensor:
        """fp32 [T, D]; `limit` 0 = no clamp."""


@frozen(kw_only=True)
class KernelSet:
    """The ops of one name; single ops may be replaced."""

    name: str
    rope: RopeKernel
    store: StoreKernel
    compress: CompressKernel
    score: ScoreKernel
    select: SelectKernel
    attend: AttentionKernel
    linear: LinearKernel
    mix: MixKernel
    experts: ExpertsKernel

    OPS: ClassVar[tuple[str, ...]] = (
        "rope", "store", "compress", "score", "select", "attend", "linear", "mix", "experts",
    )  # fmt: skip


class KernelFamily(ABC):
    """A named kernel set before it is built; what the registry and the entry point `dsv4.kernels` hold."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def why_not(
        cls, device: torch.device, model: ModelConfig, pool_config: PoolConfig
    ) -> str | None:
        """None = usable here; otherwise the reason, for `dsv4 info` and errors."""

    @classmethod
    @abstractmethod
    def build(cls, *, deterministic: bool) -> KernelSet:
        """The set; deterministic: every op row-invariant (design section 5)."""
