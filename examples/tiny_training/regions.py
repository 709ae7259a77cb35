"""Elementwise parts of the forward, written so that `torch.compile` turns each into a few fused kernels.

Training spends its time moving memory, not multiplying: in eager mode the 20 Sinkhorn steps alone are 120 passes.
Legend: T tokens, N streams, D hidden, B sequences, S tokens of a sequence, H heads, K window keys, E entries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from attrs import fields, frozen
from torch import Tensor

SINK_COLUMNS = 8
"""The sink is one column; the others, -inf, keep rows of scores 16-byte aligned for tensor cores."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, eps) * weight


def normed(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def mix_logits(
    z: Tensor, base: Tensor, scale: Tensor, n: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """z [T, (2 + N) N], already over the streams' root mean square -> pre [T, N], post [T, N], and the matrix
    [T, N, N] that the Sinkhorn steps start from."""
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (z[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = torch.softmax(logits, -1) + eps
    return pre, post, comb / (comb.sum(-2, keepdim=True) + eps)


def sinkhorn_step(comb_TNN: Tensor, eps: float) -> Tensor:
    """Rows, then columns. One step at a time: 20 of them in one piece compile for minutes."""
    comb_TNN = comb_TNN / (comb_TNN.sum(-1, keepdim=True) + eps)
    return comb_TNN / (comb_TNN.sum(-2, keepdim=True) + eps)


def inverse_rms(flat: Tensor, eps: float) -> Tensor:
    return (flat.square().mean(-1, keepdim=True) + eps).rsqrt()


def gather_streams(weights_TN: Tensor, streams_TND: Tensor) -> Tensor:
    return (weights_TN.unsqueeze(-1) * streams_TND).sum(1)


def scatter_streams(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j, one stream after the other."""
    n = streams_TND.shape[1]
    mixed = [
        post_TN[:, k, None] * y_TD
        + sum(comb_TNN[:, j, k, None] * streams_TND[:, j] for j in range(n))
        for k in range(n)
    ]
    return torch.stack(mixed, 1)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last channels in interleaved pairs; cos and sin broadcast against them."""
    rope = 2 * cos.shape[-1]
    even, odd = x[..., -rope:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rope], turned), -1)


def joint_softmax(
    band_BSHK: Tensor,
    entries_BSHE: Tensor | None,
    sink_H: Tensor,
    band_SK: Tensor,
    visible: Tensor | None,
) -> Tensor:
    """One softmax over sink, window and entries: [B, S, H, SINK_COLUMNS + K + E]. `visible` [S, E] or [B, S, E]."""
    sink = F.pad(sink_H[:, None], (0, SINK_COLUMNS - 1), value=-torch.inf)
    parts = [sink.expand(*band_BSHK.shape[:-1], -1)]
    parts.append(torch.where(band_SK[:, None], band_BSHK, -torch.inf))
    if entries_BSHE is not None and visible is not None:
        parts.append(torch.where(visible.unsqueeze(-2), entries_BSHE, -torch.inf))
    return torch.softmax(torch.cat(parts, -1), -1)


def index_scores(dots_BSHE: Tensor, weights_BSH: Tensor) -> Tensor:
    return (dots_BSHE.relu() * weights_BSH.unsqueeze(-1)).sum(-2)


def index_divergence(mass_BSE: Tensor, scores_BSE: Tensor, visible_SE: Tensor) -> Tensor:
    """Cross entropy [B, S] of the indexer's softmax under the attention's mass (both over visible entries)."""
    # finite: a mass of zero times minus infinity would be NaN
    log_p = torch.log_softmax(torch.where(visible_SE, scores_BSE, -1e4), -1)
    return -(mass_BSE * log_p).sum(-1)


def pool(kv: Tensor, gate: Tensor) -> Tensor:
    """Softmax of the gates over the pooled tokens (dim -2), per channel."""
    return (torch.softmax(gate, -2) * kv).sum(-2)


@frozen(eq=False)
class Regions:
    """The functions above, eager or compiled."""

    rms_norm: Callable[..., Tensor] = rms_norm
    normed: Callable[..., Tensor] = normed
    mix_logits: Callable[..., tuple[Tensor, Tensor, Tensor]] = mix_logits
    sinkhorn_step: Callable[..., Tensor] = sinkhorn_step
    inverse_rms: Callable[..., Tensor] = inverse_rms
    gather_streams: Callable[..., Tensor] = gather_streams
    scatter_streams: Callable[..., Tensor] = scatter_streams
    swiglu: Callable[..., Tensor] = swiglu
    joint_softmax: Callable[..., Tensor] = joint_softmax
    index_scores: Callable[..., Tensor] = index_scores
    index_divergence: Callable[..., Tensor] = index_divergence

    @classmethod
    def compiled(cls) -> Regions:
        torch._dynamo.config.recompile_limit = 64  # one graph per width and sequence length
        return cls(**{f.name: torch.compile(f.default, dynamic=False) for f in fields(cls)})
