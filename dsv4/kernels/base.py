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
from dsv4.metadata.base import FillKernel
from dsv4.metadata.plans import (
    CompressorTarget,
    FoldPlan,
    OverlapPlan,
    RopeTable,
    ScoreInputs,
    SelectOutput,
    Source,
    Workspace,
)
from dsv4.pool.base import KVView


class Rounding(enum.Enum):
    """What happens to a vector before it is stored (spec/architecture.md 7.2 and 7.3)."""

    NONE = "none"
    FP8 = "fp8"
    """KV and entries: e4m3 with a power-of-two scale per 64 on the channels that are not rotated."""
    HADAMARD_FP4 = "hadamard_fp4"
    """Indexer queries and keys: Walsh-Hadamard over all channels, then e2m1 per 32."""


class StoreKernel(ABC):
    """1. Queries: per-head RMS norm without weight, then RoPE.
    2. KV: RMSNorm, RoPE, rounding, then the row format's own rounding.
    3. `fresh` holds exactly what reading the stored row gives back.
    4. Rows are written only where loc is a row of the view.
    5. No other byte of the table changes.
    6. `q_THD` and `kv_TD` may be overwritten: go on with what is returned."""

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
        """Normed and rotated queries [T, H, D] in q's dtype. `fresh_TD` [T, D] in the row format's value dtype; None
        where no chunk can occur. Inputs may be column slices of wider tensors."""

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
    """1. score[t, e] = sum_h w[t, h] * relu(q[t, h] . key[e]) in fp32 for e < n_vis(t). 2. Other lanes are -inf.
    3. Queries take the keys' form: rotated, rounded, and e4m3 with one power-of-two scale a head for fp8 keys."""

    @abstractmethod
    def queries(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        *,
        rope: RopeTable,
        rounding: Rounding,
        scale: float,
        view: KVView,
    ) -> tuple[Tensor, Tensor]:
        """(queries [T, H, D], weights [T, H] fp32 times `scale`) as this scorer reads them against keys of `view`.

        The inputs may be column slices of wider tensors and may be overwritten; what is returned may lie in them.
        """

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
        """Scores of the tokens [first_token, first_token + T) of the forward, fp32 [T, inputs.max_entries].

        `q_THD` and `weights_TH` are rows of what `queries` returned.
        """


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
        rope: RopeTable | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """`lse`: natural log of the sum over keys, without the sink. Scores and accumulation are fp32.

        `rope`: rotate the result back (inverse RoPE of the last channels) in fp32, before the one cast to out's dtype.
        `workspace`: scratch for partial results; without it a row is never split.
        """


class LinearKernel(ABC):
    """1. y = x W^T in x's dtype. 2. If `row_invariant`, a row's bits depend on that row alone: not on its place, nor on
    how many rows there are."""

    row_invariant: ClassVar[bool]

    @abstractmethod
    def linear(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor: ...

    @abstractmethod
    def grouped(self, x_TGK: Tensor, weight_GOK: Tensor) -> Tensor:
        """Group g of every token times weight g -> [T, G, O]."""


class NormKernel(ABC):
    """1. x / sqrt(mean(x^2) + eps) * weight in fp32, one cast at the end. 2. A row depends on that row alone."""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] of any float dtype and strides, weight fp32 [D] -> x's shape and dtype."""


@frozen(eq=False)
class MixWeights:
    """Parameters of one hyper-connection, fp32. Rows of `fn`: N pre, N post, N * N comb; of the head's: N."""

    fn: Tensor
    """[(2 + N) N or N, N * D]"""
    base: Tensor
    scale: Tensor
    """[3]: pre, post, comb; the head's: [1]."""


class MixKernel(ABC):
    """1. Logits: fn . streams / rms(streams) * scale + base, all fp32 (spec/architecture.md section 2).
    2. comb: row softmax plus eps, a column step, then iterations - 1 row and column steps, eps added to every sum.
    3. A token's result is a function of its own streams."""

    @abstractmethod
    def pre(
        self,
        streams_TND: Tensor,
        weights: MixWeights,
        *,
        norm: Tensor,
        eps: float,
        hc_eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> the sub-block's input [T, D]: the weighted sum of the streams, cast to their dtype, then RMS-normed with
        `norm`; post [T, N] and comb [T, N, N], fp32."""

    @abstractmethod
    def post(self, y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
        """X'_k = post_k y + sum_j comb[j, k] X_j in fp32, one cast to the streams' dtype; in a new tensor."""

    @abstractmethod
    def head(
        self, streams_TND: Tensor, weights: MixWeights, *, norm: Tensor, eps: float, hc_eps: float
    ) -> Tensor:
        """[T, D]: streams summed with N sigmoid weights, cast to their dtype, then RMS-normed with `norm`."""


@frozen(eq=False)
class ExpertWeights:
    """Weights of one MoE layer in the activations' dtype. w13: gate rows, then up rows."""

    w13_EID: Tensor
    """[E, 2 I, D]"""
    w2_EDI: Tensor
    shared_w13: Tensor
    """[2 S, D]"""
    shared_w2: Tensor


class ExpertsKernel(ABC):
    """1. Scores sqrt(softplus(x . weight)) fp32; experts by the table, or the K best of score + bias; weights from the
    unbiased scores, normalised, times `factor`. The lower expert wins a tie.
    2. y = sum_k w2 cast(p_k * silu(clamped gate) * clamped up) over a token's experts, plus the shared expert.
    3. The sum is fp32, in ascending expert order, the shared expert's (cast to x's dtype) last."""

    @abstractmethod
    def route(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        *,
        topk: int,
        factor: float,
        token_ids_T: Tensor,
        bias_E: Tensor | None,
        table_VK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """-> expert indices [T, K] (int32 or int64), weights [T, K] fp32. Exactly one of `bias_E` and `table_VK`
        (int64, looked up by `token_ids_T`) is not None."""

    @abstractmethod
    def experts(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        weights: ExpertWeights,
        *,
        limit: float,
    ) -> Tensor:
        """[T, D] in x's dtype; `limit` 0 = no clamp."""


@frozen(kw_only=True)
class KernelSet:
    """The ops of one name; single ops may be replaced."""

    name: str
    fill: type[FillKernel]
    """Built by each metadata builder for its own buffers."""
    store: StoreKernel
    compress: CompressKernel
    score: ScoreKernel
    select: SelectKernel
    attend: AttentionKernel
    linear: LinearKernel
    norm: NormKernel
    mix: MixKernel
    experts: ExpertsKernel

    OPS: ClassVar[tuple[str, ...]] = (
        "fill", "store", "compress", "score", "select", "attend", "linear", "norm", "mix", "experts",
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
    def why_not_op(
        cls, op: str, device: torch.device, model: ModelConfig, pool_config: PoolConfig
    ) -> str | None:
        """The same of one op of the set."""
        return cls.why_not(device, model, pool_config)

    @classmethod
    def only_by_name(cls, device: torch.device) -> str | None:
        """A reason why `auto` leaves a usable set to those who ask for it; None = `auto` may take it."""
        return None

    @classmethod
    @abstractmethod
    def build(cls, *, deterministic: bool) -> KernelSet:
        """The set; deterministic: every op row-invariant (design section 5)."""
