"""Mixture of experts: hash or biased top-k routing, clamped SwiGLU, one shared expert (spec/architecture.md 4).

Legend: T tokens, D hidden, E experts, K experts per token, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import LayerConfig, ModelConfig
from dsv4.kernels.base import ExpertWeights, KernelSet
from dsv4.model.official import OfficialModule, OfficialTensor, Stored, frozen_parameter


class Router(OfficialModule):
    """Chooses K experts a token; weights always from the unbiased scores, always normalised."""

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.topk, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.hashed = layer.hash_routing
        self.weight = frozen_parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        if self.hashed:
            table = torch.zeros(config.vocab_size, self.topk, dtype=torch.int64)
            self.tid2eid = frozen_parameter(table)
        else:
            self.bias = frozen_parameter(torch.zeros(config.n_routed_experts))

    def forward(
        self, x_TD: Tensor, token_ids_T: Tensor, kernels: KernelSet
    ) -> tuple[Tensor, Tensor]:
        """-> expert indices [T, K] int64, weights [T, K] fp32."""
        return kernels.experts.route(
            x_TD, self.weight, topk=self.topk, factor=self.factor, token_ids_T=token_ids_T,
            bias_E=None if self.hashed else self.bias,
            table_VK=self.tid2eid if self.hashed else None,
        )  # fmt: skip

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        yield "weight", OfficialTensor(self.weight, "bf16")
        if self.hashed:
            yield "tid2eid", OfficialTensor(self.tid2eid, "i64")
        else:
            yield "bias", OfficialTensor(self.bias, "fp32")


class MoE(OfficialModule):
    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inter, experts = (
            config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        )  # fmt: skip
        self.limit = config.swiglu_limit
        self.expert_stored: Stored = "fp8" if config.expert_dtype == "fp8" else "fp4"
        self.gate = Router(config, layer)
        self.w13_EID = frozen_parameter(torch.zeros(experts, 2 * inter, hidden, dtype=dtype))
        self.w2_EDI = frozen_parameter(torch.zeros(experts, hidden, inter, dtype=dtype))
        self.shared_w13 = frozen_parameter(torch.zeros(2 * inter, hidden, dtype=dtype))
        self.shared_w2 = frozen_parameter(torch.zeros(hidden, inter, dtype=dtype))

    def forward(self, x_TD: Tensor, token_ids_T: Tensor, kernels: KernelSet) -> Tensor:
        chosen_TK, weights_TK = self.gate(x_TD, token_ids_T, kernels)
        weights = ExpertWeights(self.w13_EID, self.w2_EDI, self.shared_w13, self.shared_w2)
        return kernels.experts.experts(x_TD, chosen_TK, weights_TK, weights, limit=self.limit)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        inter = self.shared_w2.shape[1]
        for e in range(self.w2_EDI.shape[0]):
            w13, prefix = self.w13_EID[e], f"experts.{e}"
            yield f"{prefix}.w1.weight", OfficialTensor(w13[:inter], self.expert_stored)
            yield f"{prefix}.w2.weight", OfficialTensor(self.w2_EDI[e], self.expert_stored)
            yield f"{prefix}.w3.weight", OfficialTensor(w13[inter:], self.expert_stored)
        yield "shared_experts.w1.weight", OfficialTensor(self.shared_w13[:inter], "fp8")
        yield "shared_experts.w2.weight", OfficialTensor(self.shared_w2, "fp8")
        yield "shared_experts.w3.weight", OfficialTensor(self.shared_w13[inter:], "fp8")
