"""The whole model as one differentiable forward over equal-length sequences, on dsv4.model's own parameters.

It computes what the paged decode path computes (spec/architecture.md), all positions at once and without a cache.
Legend: B sequences, S tokens of a sequence, T = B * S, N streams, D hidden, V vocabulary, X experts, I intermediate.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from dsv4.model.block import Block
from dsv4.model.decoder import Decoder
from dsv4.model.hyper_connection import HyperConnection, HyperHead
from dsv4.model.moe import MoE
from dsv4.model.mtp import MTPBlock
from tiny_training.attention import DenseAttention, LayerTables
from tiny_training.regions import Regions


@frozen(eq=False)
class DenseOutput:
    logits_BSV: Tensor
    draft_logits_BSV: Tensor | None
    """Row s predicts token s + 2; the last row is meaningless. None without `drafts`."""
    index_loss_BS: Tensor | None
    """Sum over the CSA layers."""
    expert_load_LX: Tensor
    """Tokens per expert of each layer, draft layer last, fp32."""


@frozen(kw_only=True)
class DenseMode:
    sparse: bool = True
    """CSA reads the indexer's selection, as inference does; False: every visible entry."""
    drafts: bool = True
    index_loss: bool = False
    zero_entries: bool = False


class DenseForward:
    """Forward for one sequence length; tables are built once."""

    def __init__(self, model: Decoder, num_tokens: int, mode: DenseMode, regions: Regions) -> None:
        config = self._config = model.config
        self._model, self._mode, self._regions = model, mode, regions
        self._num_tokens = num_tokens
        # right padding is invisible to what stands before it
        unit = math.lcm(config.sliding_window, *config.ratios)
        self._padded = -(-num_tokens // unit) * unit
        device = model.embed.device
        self._tables = [
            LayerTables.build(config, layer, self._padded, device) for layer in config.layers
        ]

    def __call__(self, ids_BS: Tensor) -> DenseOutput:
        model, cfg, num_sequences = self._model, self._config, ids_BS.shape[0]
        ids_BS = F.pad(ids_BS, (0, self._padded - self._num_tokens))
        ids_T = ids_BS.flatten()
        embedded_TD = F.embedding(ids_T, model.embed)
        streams_TND = embedded_TD.unsqueeze(1).expand(-1, cfg.hc_mult, -1)
        index_losses: list[Tensor] = []
        loads: list[Tensor] = []
        for block in model.layers:
            assert isinstance(block, Block)
            streams_TND = self._block(block, streams_TND, ids_T, num_sequences, index_losses, loads)
        logits = self._logits(model.norm.weight, model.hc_head, streams_TND)
        draft_logits = None
        if self._mode.drafts and cfg.draft_layers:
            next_T = F.pad(ids_BS[:, 1:], (0, 1)).flatten()
            draft = model.mtp[0]
            assert isinstance(draft, MTPBlock)
            block_in = self._draft_input(draft, streams_TND, F.embedding(next_T, model.embed))
            out = self._block(draft, block_in, next_T, num_sequences, index_losses, loads)
            draft_logits = self._rows(
                self._logits(draft.norm.weight, draft.hc_head, out), num_sequences
            )
        index_loss = sum(index_losses) if index_losses else None
        return DenseOutput(
            self._rows(logits, num_sequences), draft_logits,
            index_loss[:, : self._num_tokens] if isinstance(index_loss, Tensor) else None,
            torch.stack(loads),
        )  # fmt: skip

    def _rows(self, logits_TV: Tensor, num_sequences: int) -> Tensor:
        return logits_TV.view(num_sequences, self._padded, -1)[:, : self._num_tokens]

    def _block(
        self, block: Block, streams_TND: Tensor, ids_T: Tensor, num_sequences: int,
        index_losses: list[Tensor], loads: list[Tensor],
    ) -> Tensor:  # fmt: skip
        cfg, r, mode = self._config, self._regions, self._mode
        attention = DenseAttention(
            cfg, cfg.layers[block.index], block.attn, self._tables[block.index], r,
            mode.sparse, mode.zero_entries, mode.index_loss,
        )  # fmt: skip
        x_TD, post, comb = self._mixed(block.hc_attn, streams_TND)
        x_TD = r.rms_norm(x_TD, block.attn_norm.weight, cfg.rms_norm_eps)
        y_TD, index_loss = attention(x_TD, num_sequences)
        if index_loss is not None:
            index_losses.append(index_loss)
        streams_TND = r.scatter_streams(y_TD, streams_TND, post, comb)
        x_TD, post, comb = self._mixed(block.hc_ffn, streams_TND)
        x_TD = r.rms_norm(x_TD, block.ffn_norm.weight, cfg.rms_norm_eps)
        y_TD, load = self._experts(block.ffn, x_TD, ids_T)
        loads.append(load)
        return r.scatter_streams(y_TD, streams_TND, post, comb)

    def _mixed(self, hc: HyperConnection, streams_TND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cfg, r = self._config, self._regions
        flat = streams_TND.flatten(1)
        z = F.linear(flat, hc.fn) * r.inverse_rms(flat, cfg.rms_norm_eps)
        pre, post, comb = r.mix_logits(z, hc.base, hc.scale, cfg.hc_mult, cfg.hc_eps)
        for _ in range(cfg.hc_sinkhorn_iters - 1):
            comb = r.sinkhorn_step(comb, cfg.hc_eps)
        return r.gather_streams(pre, streams_TND), post, comb

    def _experts(self, ffn: MoE, x_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Every expert on every token, weighted by the routing: few experts, and one product for all of them."""
        gate, experts = ffn.gate, self._config.n_routed_experts
        # the root of softplus has no finite slope at zero
        scores_TX = F.softplus(F.linear(x_TD, gate.weight)).clamp(min=1e-12).sqrt()
        if gate.hashed:
            chosen_TK = gate.tid2eid[ids_T]
        else:
            chosen_TK = (scores_TX.detach() + gate.bias).topk(gate.topk, -1).indices
        chosen_TX = torch.zeros_like(scores_TX).scatter(-1, chosen_TK, 1.0)
        weights_TX = scores_TX * chosen_TX
        weights_TX = weights_TX / weights_TX.sum(-1, keepdim=True) * gate.factor
        gate_up = F.linear(x_TD, ffn.w13_EID.flatten(0, 1)).unflatten(-1, (experts, -1))
        inner_TXI = self._regions.swiglu(gate_up, ffn.limit) * weights_TX.unsqueeze(-1)
        w2_DE = ffn.w2_EDI.transpose(0, 1).flatten(1)
        shared = self._regions.swiglu(F.linear(x_TD, ffn.shared_w13), ffn.limit)
        y_TD = F.linear(inner_TXI.flatten(1), w2_DE) + F.linear(shared, ffn.shared_w2)
        return y_TD, chosen_TX.sum(0)

    def _draft_input(self, draft: MTPBlock, streams_TND: Tensor, next_TD: Tensor) -> Tensor:
        norm, eps = self._regions.rms_norm, self._config.rms_norm_eps
        u_TD = F.linear(norm(next_TD, draft.enorm.weight, eps), draft.e_proj)
        mixed = F.linear(norm(streams_TND.contiguous(), draft.hnorm.weight, eps), draft.h_proj)
        return u_TD.unsqueeze(1) + mixed

    def _logits(self, norm_D: Tensor, head: HyperHead, streams_TND: Tensor) -> Tensor:
        cfg, r = self._config, self._regions
        flat = streams_TND.flatten(1)
        z = F.linear(flat, head.fn) * r.inverse_rms(flat, cfg.rms_norm_eps)
        weights_TN = torch.sigmoid(z * head.scale + head.base) + cfg.hc_eps
        hidden_TD = r.rms_norm(r.gather_streams(weights_TN, streams_TND), norm_D, cfg.rms_norm_eps)
        return F.linear(hidden_TD, self._model.head)
