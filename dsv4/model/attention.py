"""MQA layer of DeepSeek-V4 (spec/architecture.md section 3): projections around the kernels, and nothing else.

It reads its `LayerMetadata` and computes no address. Legend: T tokens, D hidden, H heads, C head dim, G output groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.kernels.base import KernelSet, Rounding
from dsv4.metadata.forward import LayerMetadata
from dsv4.model.compressor import Compressor
from dsv4.model.indexer import Indexer
from dsv4.model.norm import RMSNorm
from dsv4.model.official import OfficialModule, OfficialTensor, frozen_parameter


class MQALayer(OfficialModule):
    """One shared KV head, its vector both key and value; queries and output are low rank."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.kind = config, layer.kind
        hidden, head, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        self.rounding = Rounding.FP8 if config.kv_quant == "official" else Rounding.NONE
        self.compressor = (
            None if layer.kind is LayerKind.SLIDING else Compressor(config, layer, head)
        )
        self.indexer = Indexer(config, layer) if layer.kind is LayerKind.CSA else None
        index_out = config.index_n_heads * config.index_head_dim if self.indexer else 0
        state_out = (self.compressor.width if self.compressor else 0) + (
            self.indexer.width if self.indexer else 0
        )
        # one GEMM from x in the model's dtype (wq_a | wkv), one from the query latent (wq_b | indexer wq_b),
        # one from x in fp32 (compressors, indexer weights: fp32 in the official code)
        self.w_in = frozen_parameter(torch.zeros(config.q_lora_rank + head, hidden, dtype=dtype))
        self.w_q = frozen_parameter(
            torch.zeros(heads * head + index_out, config.q_lora_rank, dtype=dtype)
        )
        self.w_state = frozen_parameter(torch.zeros(state_out, hidden))
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.kv_norm = RMSNorm(head, config.rms_norm_eps)
        group_in = heads * head // config.o_groups
        self.wo_a_GOC = frozen_parameter(
            torch.zeros(config.o_groups, config.o_lora_rank, group_in, dtype=dtype)
        )
        self.wo_b = frozen_parameter(
            torch.zeros(hidden, config.o_groups * config.o_lora_rank, dtype=dtype)
        )
        self.attn_sink = frozen_parameter(torch.zeros(heads))

    def forward(self, x_TD: Tensor, meta: LayerMetadata, kernels: KernelSet) -> Tensor:
        cfg, num_tokens = self.config, x_TD.shape[0]
        latent_TR, kv_TC = kernels.linear.linear(x_TD, self.w_in).split(
            [cfg.q_lora_rank, cfg.head_dim], dim=-1
        )
        latent_TR = self.q_norm(latent_TR, kernels)
        queries = kernels.linear.linear(latent_TR, self.w_q)
        own = cfg.num_attention_heads * cfg.head_dim
        q_THC = queries[:, :own].view(num_tokens, cfg.num_attention_heads, cfg.head_dim)
        q_THC = kernels.store.store(
            q_THC, kv_TC, kv_norm=self.kv_norm.weight, eps=cfg.rms_norm_eps, rope=meta.rope,
            store_loc_T=meta.store_loc_T, view=meta.window_view, rounding=self.rounding,
            fresh_TD=meta.workspace.fresh_TD,
        )  # fmt: skip
        if self.compressor is not None:
            self._compress(x_TD, queries[:, own:], meta, kernels)
        out_THC = torch.empty(q_THC.shape, dtype=x_TD.dtype, device=x_TD.device)
        kernels.attend.attend(
            q_THC, meta.sources, self.attn_sink, scale=cfg.softmax_scale, out_THD=out_THC,
            rope=meta.rope, workspace=meta.workspace,
        )  # fmt: skip
        if meta.tail_loc_T is not None and meta.workspace.fresh_TD is not None:
            kernels.store.store_tail(
                meta.workspace.fresh_TD, tail_loc_T=meta.tail_loc_T, view=meta.window_view
            )
        grouped = out_THC.view(num_tokens, cfg.o_groups, self.wo_a_GOC.shape[-1])
        return kernels.linear.linear(
            kernels.linear.grouped(grouped, self.wo_a_GOC).flatten(1), self.wo_b
        )

    def _compress(
        self, x_TD: Tensor, index_q: Tensor, meta: LayerMetadata, kernels: KernelSet
    ) -> None:
        assert self.compressor is not None
        assert meta.main is not None
        projected = kernels.linear.linear(x_TD.float(), self.w_state)
        width = self.compressor.width
        self.compressor(projected[:, :width], meta, meta.main, self.rounding, kernels)
        if self.indexer is not None:
            self.indexer(projected[:, width:], index_q, meta, kernels)

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        cfg = self.config
        heads_out = cfg.num_attention_heads * cfg.head_dim
        yield "attn_sink", OfficialTensor(self.attn_sink, "fp32")
        yield "wq_a.weight", OfficialTensor(self.w_in[: cfg.q_lora_rank], "fp8")
        yield "wkv.weight", OfficialTensor(self.w_in[cfg.q_lora_rank :], "fp8")
        yield "wq_b.weight", OfficialTensor(self.w_q[:heads_out], "fp8")
        yield "wo_a.weight", OfficialTensor(self.wo_a_GOC.flatten(0, 1), "fp8")
        yield "wo_b.weight", OfficialTensor(self.wo_b, "fp8")
        start = 0
        if self.compressor is not None:
            yield from self.compressor.slices("compressor.", self.w_state)
            start = self.compressor.width
        if self.indexer is not None:
            yield "indexer.wq_b.weight", OfficialTensor(self.w_q[heads_out:], "fp8")
            yield from self.indexer.slices(self.w_state[start:])
