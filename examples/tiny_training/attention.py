"""Dense attention of one layer over whole sequences: window, compressed entries and indexer at once, differentiable.

Legend: B sequences, S tokens of a sequence (a multiple of the window and of every ratio), T = B * S tokens,
D hidden, H heads, C head dim, W window, E entries of a sequence, P half the rope width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.kernels.select_ref import ranking_keys
from dsv4.metadata.rope import inverse_frequencies
from dsv4.model.attention import MQALayer
from dsv4.model.compressor import Compressor
from dsv4.quant import hadamard, round_fp4, round_fp8
from tiny_training.regions import SINK_COLUMNS, Regions, normed, pool, rms_norm, rotate


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded`, exactly, with the gradient of `x`."""
    return rounded.detach() + (x - x.detach())


@frozen(eq=False)
class LayerTables:
    """What depends on positions only: angles, the window band, entry visibility."""

    cos_SP: Tensor
    sin_SP: Tensor
    band_SK: Tensor
    """[S, 2 W] bool: keys of the block before and of the own block of W tokens that a token sees."""
    visible_SE: Tensor | None
    """Entry w is visible to token t iff w < (t + 1) // ratio."""

    @classmethod
    def build(
        cls, config: ModelConfig, layer: LayerConfig, num_tokens: int, device: torch.device
    ) -> LayerTables:
        frequencies = inverse_frequencies(layer.rope_theta, config.qk_rope_head_dim, layer.yarn)
        position_S = torch.arange(num_tokens)
        angle_SP = position_S[:, None].float() * frequencies
        window = config.sliding_window
        key_SK = (position_S // window * window)[:, None] + torch.arange(-window, window)
        band_SK = (key_SK >= 0) & (key_SK <= position_S[:, None])
        band_SK &= key_SK > position_S[:, None] - window
        visible_SE = None
        if layer.ratio:
            entries = padded_entries(num_tokens, layer.ratio)
            visible_SE = (torch.arange(entries) < ((position_S + 1) // layer.ratio)[:, None]).to(
                device
            )
        return cls(
            torch.cos(angle_SP).to(device), torch.sin(angle_SP).to(device), band_SK.to(device), visible_SE
        )  # fmt: skip


def padded_entries(num_tokens: int, ratio: int) -> int:
    """Entries, up to a multiple of 8 with entries that nobody sees: aligned rows for the tensor cores."""
    return -(-(num_tokens // ratio) // 8) * 8


@frozen(eq=False)
class DenseAttention:
    """One layer's attention. `sparse`: CSA reads the indexer's selection, else every visible entry."""

    config: ModelConfig
    layer: LayerConfig
    attn: MQALayer
    tables: LayerTables
    regions: Regions
    sparse: bool
    zero_entries: bool
    """Read zeros in place of entries: the control of the recall task."""
    index_loss: bool

    def __call__(self, x_TD: Tensor, num_sequences: int) -> tuple[Tensor, Tensor | None]:
        """-> (y [T, D], indexer loss [B, S] or None)."""
        cfg, attn, r = self.config, self.attn, self.regions
        heads, head = cfg.num_attention_heads, cfg.head_dim
        latent, kv = F.linear(x_TD, attn.w_in).split([cfg.q_lora_rank, head], -1)
        latent = r.rms_norm(latent, attn.q_norm.weight, cfg.rms_norm_eps)
        q = F.linear(latent, attn.w_q[: heads * head]).view(num_sequences, -1, heads, head)
        cos, sin = self.tables.cos_SP, self.tables.sin_SP
        q_BSHC = rotate(normed(q, cfg.rms_norm_eps), cos[:, None], sin[:, None])
        kv = rms_norm(kv.unflatten(0, (num_sequences, -1)), attn.kv_norm.weight, cfg.rms_norm_eps)
        kv_BSC = self._rounded(rotate(kv, cos, sin))
        entries_BEC = self._entries(x_TD, num_sequences) if attn.compressor is not None else None
        visible, loss, scores_BSE = self.tables.visible_SE, None, None
        if attn.indexer is not None and (self.sparse or self.index_loss):
            scores_BSE = self._index_scores(x_TD.detach(), latent.detach(), num_sequences)
            if self.sparse:
                visible = self._selected(scores_BSE.detach())
        probabilities, keys = self._probabilities(q_BSHC, kv_BSC, entries_BEC, visible)
        if self.index_loss and scores_BSE is not None:
            dense = probabilities.detach()
            if self.sparse:
                with torch.no_grad():
                    dense, _ = self._probabilities(
                        q_BSHC, kv_BSC, entries_BEC, self.tables.visible_SE
                    )
            loss = self._index_loss(scores_BSE, dense[..., SINK_COLUMNS + keys.shape[1] :])
        out = self._values(probabilities, keys, entries_BEC)
        out = rotate(out, cos[:, None], -sin[:, None]).reshape(
            -1, cfg.o_groups, heads * head // cfg.o_groups
        )
        grouped = torch.einsum("tgc,goc->tgo", out, attn.wo_a_GOC).flatten(1)
        return F.linear(grouped, attn.wo_b), loss

    def _probabilities(
        self, q_BSHC: Tensor, kv_BSC: Tensor, entries_BEC: Tensor | None, visible: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """-> (softmax rows `sink | block before | own block | entries`, window keys [B * S / W, 2 W, C])."""
        window, scale = self.config.sliding_window, self.config.softmax_scale
        blocks = kv_BSC.unflatten(1, (-1, window))
        before = F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1]
        keys = torch.cat((before, blocks), 2).flatten(0, 1)
        q = q_BSHC * scale
        band = torch.bmm(q.reshape(keys.shape[0], -1, q.shape[-1]), keys.transpose(1, 2))
        scores = None
        if entries_BEC is not None:
            scores = torch.bmm(q.flatten(1, 2), entries_BEC.transpose(1, 2)).view(*q.shape[:3], -1)
        probabilities = self.regions.joint_softmax(
            band.view(*q.shape[:3], -1), scores, self.attn.attn_sink, self.tables.band_SK, visible
        )
        return probabilities, keys

    def _values(self, probabilities: Tensor, keys: Tensor, entries_BEC: Tensor | None) -> Tensor:
        """Weighted sum of window rows and entries, [B, S, H, C]."""
        lead, first = probabilities.shape[:3], SINK_COLUMNS + keys.shape[1]
        band = probabilities[..., SINK_COLUMNS:first].reshape(keys.shape[0], -1, keys.shape[1])
        out = torch.bmm(band, keys).view(*lead, -1)
        if entries_BEC is None:
            return out
        far = probabilities[..., first:].flatten(1, 2)
        return out + torch.bmm(far, entries_BEC).view(*lead, -1)

    def _rounded(self, kv: Tensor) -> Tensor:
        """What the cache would hand back of a KV row or entry."""
        if self.config.kv_quant != "official":
            return kv
        nope = self.config.nope_head_dim
        low = straight_through(kv[..., :nope], round_fp8(kv[..., :nope].detach()))
        return torch.cat((low, kv[..., nope:]), -1)

    def _pooled(self, projected: Tensor, compressor: Compressor, num_sequences: int) -> Tensor:
        """Normed and rotated entries [B, E, C] of a projection `kv | gate` [T, 2 * channels]."""
        cfg, ratio = self.config, self.layer.ratio
        windows = projected.view(num_sequences, -1, ratio, compressor.width)
        kv, gate = windows.split(compressor.channels, -1)
        gate = gate + compressor.ape_MC
        if self.layer.kind is LayerKind.CSA:
            # the A half of the window before, the B half of the own one; nothing is before window 0
            (kv_a, kv_b), (gate_a, gate_b) = kv.chunk(2, -1), gate.chunk(2, -1)
            shift = (0, 0, 0, 0, 1, 0)
            kv = torch.cat((F.pad(kv_a, shift)[:, :-1], kv_b), 2)
            gate = torch.cat((F.pad(gate_a, shift, value=-torch.inf)[:, :-1], gate_b), 2)
        entries = rms_norm(pool(kv, gate), compressor.norm.weight, cfg.rms_norm_eps)
        entries = rotate(entries, self.tables.cos_SP[::ratio], self.tables.sin_SP[::ratio])
        missing = padded_entries(self.tables.cos_SP.shape[0], ratio) - entries.shape[1]
        return F.pad(entries, (0, 0, 0, missing))

    def _entries(self, x_TD: Tensor, num_sequences: int) -> Tensor:
        compressor = self.attn.compressor
        assert compressor is not None
        projected = F.linear(x_TD, self.attn.w_state[: compressor.width])
        entries = self._rounded(self._pooled(projected, compressor, num_sequences))
        return torch.zeros_like(entries) if self.zero_entries else entries

    def _index_scores(self, x_TD: Tensor, latent_TR: Tensor, num_sequences: int) -> Tensor:
        """[B, S, E]; inputs are detached: the indexer learns from its own loss alone."""
        cfg, attn, indexer = self.config, self.attn, self.attn.indexer
        assert indexer is not None
        assert attn.compressor is not None
        own = cfg.num_attention_heads * cfg.head_dim
        q = F.linear(latent_TR, attn.w_q[own:]).view(num_sequences, -1, indexer.heads, indexer.dim)
        q = rotate(q, self.tables.cos_SP[:, None], self.tables.sin_SP[:, None])
        projected = F.linear(x_TD, attn.w_state[attn.compressor.width :])
        keys = self._pooled(
            projected[:, : indexer.compressor.width], indexer.compressor, num_sequences
        )
        if cfg.kv_quant == "official":
            q, keys = (
                straight_through(h, round_fp4(h.detach())) for h in (hadamard(q), hadamard(keys))
            )
        weights = projected[:, indexer.compressor.width :] * (
            indexer.dim**-0.5 * indexer.heads**-0.5
        )
        dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(*q.shape[:3], -1)
        return self.regions.index_scores(dots, weights.view(q.shape[:3]))

    def _selected(self, scores_BSE: Tensor) -> Tensor:
        """[B, S, E] bool: the best `index_topk` visible entries of each token."""
        visible_SE = self.tables.visible_SE
        assert visible_SE is not None
        # ties are common (every head clipped by the ReLU gives 0) and go to the earlier entry, as in decoding
        keys = ranking_keys(scores_BSE.masked_fill(~visible_SE, -torch.inf))
        best = keys.topk(min(self.layer.index_topk, keys.shape[-1]), -1, sorted=False).indices
        chosen = torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, best, True)
        return chosen & visible_SE

    def _index_loss(self, scores_BSE: Tensor, dense_BSHE: Tensor) -> Tensor:
        """[B, S]: teach the index scores the mass that attention would give each entry without any selection."""
        return self.regions.index_divergence(dense_BSHE.mean(2), scores_BSE, self.tables.visible_SE)
