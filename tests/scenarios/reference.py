"""REF: a whole sequence recomputed from its first token, straight from spec/architecture.md. No cache, one sequence,
fp32, a loop wherever the text has one. It shares no code with dsv4 but the config's type.

Legend: S tokens, N streams, D hidden, H heads, C head dim, R rope channels, E entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import Factory, define
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, ModelConfig, YarnConfig


@define(eq=False)
class Run:
    """What one recompute saw, layer by layer (a layer without such a thing has no key)."""

    logits: Tensor = Factory(lambda: torch.empty(0))
    attn_in: dict[int, Tensor] = Factory(dict)
    attn_out: dict[int, Tensor] = Factory(dict)
    ffn_out: dict[int, Tensor] = Factory(dict)
    window_kv: dict[int, Tensor] = Factory(dict)
    """[S, C] as attention reads it."""
    entries: dict[int, Tensor] = Factory(dict)
    """[E, C] as attention reads them."""
    index_keys: dict[int, Tensor] = Factory(dict)
    picks: dict[int, list[list[int]]] = Factory(dict)
    """Entries that each token of a compressing layer reads, ascending."""
    index_margin: float = math.inf
    """Smallest gap between the last chosen and the first rejected index score."""
    router_margin: float = math.inf


class Reference:
    """`weights`: published names (spec/checkpoint.md). `row_dtype`: what KV is cast to before it is rounded and kept
    (bf16 rows); fp32 leaves it alone."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        row_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.weights, self.row_dtype = config, weights, row_dtype
        self.official = config.kv_quant == "official"

    def run(self, ids: Sequence[int]) -> Run:
        """Section 1."""
        cfg, run = self.config, Run()
        embedded = self.weights["embed.weight"].float()[torch.tensor(ids)]
        streams = torch.stack([embedded] * cfg.hc_mult, dim=1)
        for index, layer in enumerate(cfg.main_layers):
            at = f"layers.{index}."
            x, post, comb = self._hc_pre(streams, f"{at}hc_attn_")
            x = self._norm(x, f"{at}attn_norm.weight")
            y = self._attention(x, layer, index, run)
            run.attn_in[index], run.attn_out[index] = x, y
            streams = hc_post(y, streams, post, comb)
            x, post, comb = self._hc_pre(streams, f"{at}hc_ffn_")
            x = self._norm(x, f"{at}ffn_norm.weight")
            y = self._moe(x, ids, layer, f"{at}ffn.", run)
            run.ffn_out[index] = y
            streams = hc_post(y, streams, post, comb)
        hidden = self._norm(self._hc_head(streams), "norm.weight")
        run.logits = hidden @ self._w("head.weight").T
        return run

    def _w(self, name: str) -> Tensor:
        return self.weights[name].float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.config.rms_norm_eps) * self._w(name)

    # section 2

    def _mix(self, streams: Tensor, prefix: str) -> Tensor:
        flat = streams.flatten(1)
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (flat @ self._w(f"{prefix}fn").T) * scale

    def _hc_pre(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.config.hc_mult, self.config.hc_eps
        z, base, scale = (
            self._mix(streams, prefix),
            self._w(f"{prefix}base"),
            self._w(f"{prefix}scale"),
        )
        pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (z[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
        comb = torch.softmax(comb, -1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return (pre.unsqueeze(-1) * streams).sum(1), post, comb

    def _hc_head(self, streams: Tensor) -> Tensor:
        z = self._mix(streams, "hc_head_")
        weight = torch.sigmoid(z * self._w("hc_head_scale") + self._w("hc_head_base"))
        return ((weight + self.config.hc_eps).unsqueeze(-1) * streams).sum(1)

    # section 3

    def _attention(self, x: Tensor, layer: LayerConfig, index: int, run: Run) -> Tensor:
        cfg, at = self.config, f"layers.{index}.attn."
        heads, dim, eps = cfg.num_attention_heads, cfg.head_dim, cfg.rms_norm_eps
        freqs = frequencies(layer.rope_theta, cfg.qk_rope_head_dim, layer.yarn)
        positions = torch.arange(len(x))
        latent = self._norm(x @ self._w(f"{at}wq_a.weight").T, f"{at}q_norm.weight")
        q = (latent @ self._w(f"{at}wq_b.weight").T).view(-1, heads, dim)
        q = rotate(rms(q, eps), positions.unsqueeze(1), freqs)
        kv = self._norm(x @ self._w(f"{at}wkv.weight").T, f"{at}kv_norm.weight")
        kv = self._kv_rounded(rotate(kv, positions, freqs))
        run.window_kv[index] = kv
        picks: list[list[int]] = [[] for _ in range(len(x))]
        entries = kv[:0]
        if layer.kind is not LayerKind.SLIDING:
            pooled = self._compress(x, f"{at}compressor.", layer, dim, freqs)
            entries = self._kv_rounded(pooled)
            picks = self._visible(len(x), layer.ratio)
            run.entries[index] = entries
        if layer.kind is LayerKind.CSA:
            picks = self._select(x, latent, layer, index, freqs, picks, run)
        run.picks[index] = picks
        sink = self._w(f"{at}attn_sink")
        out = []
        for t in range(len(x)):
            keys = torch.cat([kv[max(0, t - cfg.sliding_window + 1) : t + 1], entries[picks[t]]])
            out.append(attend_one(q[t], keys, sink, dim**-0.5))
        out_SHC = rotate(torch.stack(out), positions.unsqueeze(1), freqs, inverse=True)
        return self._project_out(out_SHC, at)

    def _project_out(self, out_SHC: Tensor, at: str) -> Tensor:
        """3.8"""
        groups = self.config.o_groups
        parts = out_SHC.flatten(1).chunk(groups, dim=-1)
        weights = self._w(f"{at}wo_a.weight").chunk(groups, dim=0)
        u = torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)], -1)
        return u @ self._w(f"{at}wo_b.weight").T

    def _kv_rounded(self, kv: Tensor) -> Tensor:
        """7.2"""
        kv = kv.to(self.row_dtype).float()
        if not self.official:
            return kv
        nope = kv.shape[-1] - self.config.qk_rope_head_dim
        blocks = [round_fp8(block) for block in kv[:, :nope].split(64, dim=-1)]
        return torch.cat([*blocks, kv[:, nope:]], -1)

    def _index_rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """7.3"""
        x = x.to(dtype).float()
        if not self.official:
            return x
        x = hadamard(x).to(dtype).float()
        return torch.cat([round_fp4(block) for block in x.split(32, dim=-1)], -1)

    def _compress(self, x: Tensor, at: str, layer: LayerConfig, dim: int, freqs: Tensor) -> Tensor:
        """3.5, up to the rotation."""
        m, overlap = layer.ratio, layer.kind is LayerKind.CSA
        kv, gate = x @ self._w(f"{at}wkv.weight").T, x @ self._w(f"{at}wgate.weight").T
        ape, entries = self._w(f"{at}ape"), []
        for w in range(len(x) // m):
            own = slice(m * w, m * w + m)
            if not overlap:
                values, gates = kv[own], gate[own] + ape
            else:
                values, gates = kv[own, dim:], gate[own, dim:] + ape[:, dim:]
                if w > 0:
                    before = slice(m * (w - 1), m * w)
                    values = torch.cat([kv[before, :dim], values])
                    gates = torch.cat([gate[before, :dim] + ape[:, :dim], gates])
            pooled = (torch.softmax(gates, dim=0) * values).sum(0)
            entry = self._norm(pooled, f"{at}norm.weight")
            entries.append(rotate(entry, torch.tensor(m * w), freqs))
        return torch.stack(entries) if entries else x.new_empty(0, dim)

    @staticmethod
    def _visible(num_tokens: int, ratio: int) -> list[list[int]]:
        return [list(range((t + 1) // ratio)) for t in range(num_tokens)]

    def _select(
        self,
        x: Tensor,
        latent: Tensor,
        layer: LayerConfig,
        index: int,
        freqs: Tensor,
        visible: list[list[int]],
        run: Run,
    ) -> list[list[int]]:
        """3.7"""
        cfg, at = self.config, f"layers.{index}.attn.indexer."
        heads, dim, k = cfg.index_n_heads, cfg.index_head_dim, layer.index_topk
        q = (latent @ self._w(f"{at}wq_b.weight").T).view(-1, heads, dim)
        q = self._index_rounded(rotate(q, torch.arange(len(x)).unsqueeze(1), freqs), torch.float32)
        keys = self._compress(x, f"{at}compressor.", layer, dim, freqs)
        keys = self._index_rounded(keys, self.row_dtype)
        run.index_keys[index] = keys
        weight = (x @ self._w(f"{at}weights_proj.weight").T) * (dim**-0.5 * heads**-0.5)
        picks = []
        for t, entries in enumerate(visible):
            dots = torch.relu(q[t] @ keys[entries].T)
            scores = (weight[t].unsqueeze(1) * dots).sum(0)
            best = scores.sort(descending=True)
            if len(entries) > k:
                gap = float(best.values[k - 1] - best.values[k])
                run.index_margin = min(run.index_margin, gap)
            picks.append(sorted(best.indices[:k].tolist()))
        return picks

    # section 4

    def _moe(self, x: Tensor, ids: Sequence[int], layer: LayerConfig, at: str, run: Run) -> Tensor:
        cfg = self.config
        scores = torch.sqrt(torch.nn.functional.softplus(x @ self._w(f"{at}gate.weight").T))
        out = []
        for t, token in enumerate(ids):
            if layer.hash_routing:
                chosen = self.weights[f"{at}gate.tid2eid"][token].tolist()
            else:
                best = (scores[t] + self._w(f"{at}gate.bias")).sort(descending=True)
                chosen = best.indices[: cfg.num_experts_per_tok].tolist()
                ranked = [*best.values.tolist(), -math.inf]
                gap = ranked[cfg.num_experts_per_tok - 1] - ranked[cfg.num_experts_per_tok]
                run.router_margin = min(run.router_margin, gap)
            p = scores[t][chosen]
            p = p / p.sum() * cfg.routed_scaling_factor
            y = self._expert(x[t], f"{at}shared_experts.", torch.tensor(1.0))
            for expert, weight in zip(chosen, p, strict=True):
                y = y + self._expert(x[t], f"{at}experts.{expert}.", weight)
            out.append(y)
        return torch.stack(out)

    def _expert(self, x: Tensor, at: str, weight: Tensor) -> Tensor:
        limit = self.config.swiglu_limit or math.inf
        gate = (self._w(f"{at}w1.weight") @ x).clamp(max=limit)
        up = (self._w(f"{at}w3.weight") @ x).clamp(-limit, limit)
        return self._w(f"{at}w2.weight") @ (weight * gate * torch.sigmoid(gate) * up)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j"""
    mixed = torch.einsum("sjk,sjd->skd", comb, streams)
    return post.unsqueeze(-1) * y.unsqueeze(1) + mixed


def frequencies(theta: float, rope: int, yarn: YarnConfig | None) -> Tensor:
    """3.1, fp32 [R / 2]."""
    plain = 1.0 / theta ** (torch.arange(0, rope, 2).float() / rope)
    if yarn is None:
        return plain

    def dim(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return rope * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(dim(yarn.beta_fast)), 0)
    high: float = min(math.ceil(dim(yarn.beta_slow)), rope - 1)
    high = high + 0.001 if low == high else high
    ramp = torch.clamp((torch.arange(rope // 2) - low) / (high - low), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rotate(x: Tensor, position: Tensor, freqs: Tensor, *, inverse: bool = False) -> Tensor:
    """Interleaved pairs of the last R channels by position * frequency."""
    width = 2 * len(freqs)
    angle = position.unsqueeze(-1).float() * freqs * (-1 if inverse else 1)
    a, b = x[..., -width::2], x[..., 1 - width :: 2] if width > 1 else x[..., :0]
    turned = torch.stack(
        [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1
    )
    return torch.cat([x[..., :-width], turned.flatten(-2)], -1)


def attend_one(q_HC: Tensor, keys_KC: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    """3.4 for one token: [H, C]."""
    scores = q_HC @ keys_KC.T * scale
    top = torch.maximum(scores.amax(-1), sink_H)
    weight = torch.exp(scores - top.unsqueeze(-1))
    mass = weight.sum(-1) + torch.exp(sink_H - top)
    return (weight @ keys_KC) / mass.unsqueeze(-1)


def pow2_ceil(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def round_fp8(block: Tensor) -> Tensor:
    scale = pow2_ceil(block.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    return (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def round_fp4(block: Tensor) -> Tensor:
    """e2m1: the nearest of eight magnitudes, ties to the even code."""
    scale = pow2_ceil(block.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    size = (block / scale).abs().clamp(max=6)
    gap = (size.unsqueeze(-1) - steps).abs()
    # an odd code loses a tie: it is pushed away by less than any other difference
    gap = gap + torch.tensor([0.0, 1e-9] * 4, dtype=torch.float64)
    return torch.sign(block) * steps[gap.argmin(-1)] * scale


def hadamard(x: Tensor) -> Tensor:
    """Sylvester: H_2n = [[H, H], [H, -H]], times d^-0.5."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return ((x.double() @ matrix) * x.shape[-1] ** -0.5).float()
