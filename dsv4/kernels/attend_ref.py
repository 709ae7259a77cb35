"""Attend: one softmax over the rows of all sources, and a sink in the denominator (spec/architecture.md 3.4).

Legend: T tokens of a tile, H heads, D head dim, K lanes (all sources, side by side).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.kernels.base import AttentionKernel
from dsv4.metadata.plans import IndexStream, Source

TILE_VALUES = (
    1 << 20
)  # gathered values per token tile: 4 MiB in fp32, so that a tile stays in a CPU's L2
LANE_TILE = 64
"""Lanes per matrix product in deterministic mode. A segment starts on a tile border, so a token's tiles do not depend
on how wide other tokens' segments are; a tile without rows adds exact zeros."""


def padded_rows(stream: IndexStream, first: int, last: int, lane_tile: int) -> Tensor:
    """Row indices of tokens [first, last) as [T, K], -1 behind each token's list; K a multiple of lane_tile."""
    width = -(-stream.max_rows // lane_tile) * lane_tile
    key = (first, last, width)
    if key in stream.dense:
        return stream.dense[key]
    start_T1 = stream.indptr_T1[first:last].unsqueeze(1)
    lane_TK = start_T1 + torch.arange(width, dtype=torch.int32, device=start_T1.device)
    inside = lane_TK < stream.indptr_T1[first + 1 : last + 1].unsqueeze(1)
    lane_TK = lane_TK.clamp_(max=max(stream.indices_N.shape[0] - 1, 0))
    row_TK = torch.where(inside, stream.indices_N[lane_TK.long()], -1)
    if stream.final:
        stream.dense[key] = row_TK
    return row_TK


def gather(source: Source, first: int, last: int, lane_tile: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens [first, last): values [T, K, D], zero where none, and validity [T, K]."""
    num_rows = source.view.num_rows
    row_TK = padded_rows(source.stream, first, last, lane_tile)
    fresh_rows = 0 if source.fresh_TD is None else source.fresh_TD.shape[0]
    valid_TK = (row_TK >= 0) & (row_TK < num_rows + fresh_rows)
    row_TK = row_TK.masked_fill(~valid_TK, 0)
    if source.fresh_TD is None:
        values = source.view.read(row_TK)
    else:
        is_fresh = row_TK >= num_rows
        fresh = source.fresh_TD[torch.where(is_fresh, row_TK - num_rows, 0).long()]
        values = torch.where(
            is_fresh.unsqueeze(-1), fresh, source.view.read(torch.where(is_fresh, 0, row_TK))
        )
    # whatever a lane that is no row read (poison included) must not reach the products
    return values.masked_fill_(~valid_TK.unsqueeze(-1), 0.0), valid_TK


class TorchAttention(AttentionKernel):
    def __init__(self, *, deterministic: bool = False) -> None:
        self._lane_tile = LANE_TILE if deterministic else 1

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
        num_tokens, dim = q_THD.shape[0], q_THD.shape[-1]
        lanes = sum(source.stream.max_rows + self._lane_tile for source in sources)
        tile = max(1, TILE_VALUES // (lanes * dim))
        for first in range(0, num_tokens, tile):
            last = min(first + tile, num_tokens)
            parts = [gather(s, first, last, self._lane_tile) for s in sources if s.stream.max_rows]
            if not parts:
                out_THD[first:last] = 0
                if lse_TH is not None:
                    lse_TH[first:last] = -torch.inf
                continue
            values = torch.cat([v for v, _ in parts], 1) if len(parts) > 1 else parts[0][0]
            valid = torch.cat([v for _, v in parts], 1) if len(parts) > 1 else parts[0][1]
            out, lse = self._softmax(
                q_THD[first:last].to(values.dtype), values, valid, sink_H, scale
            )
            out_THD[first:last] = out
            if lse_TH is not None:
                lse_TH[first:last] = lse

    def _softmax(
        self, q_THD: Tensor, values_TKD: Tensor, valid_TK: Tensor, sink_H: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = values_TKD.shape[1]
        lane_tile = width if self._lane_tile == 1 else self._lane_tile
        tiles = [slice(a, a + lane_tile) for a in range(0, width, lane_tile)]
        scores = [torch.bmm(q_THD, values_TKD[:, t].transpose(1, 2)) for t in tiles]
        scores_THK = (torch.cat(scores, -1) if len(scores) > 1 else scores[0]).mul_(scale)
        scores_THK.masked_fill_(~valid_TK.unsqueeze(1), -torch.inf)
        # the sink takes part in the maximum, so a token without rows has a finite one
        sink_H1 = sink_H.to(scores_THK.dtype).unsqueeze(-1)
        shift_TH1 = torch.maximum(scores_THK.amax(-1, keepdim=True), sink_H1)
        shift_TH1 = torch.where(shift_TH1 == -torch.inf, 0.0, shift_TH1)
        weights_THK = torch.exp(scores_THK - shift_TH1)
        total, out = None, None
        for t in tiles:
            part = torch.bmm(weights_THK[:, :, t], values_TKD[:, t])
            mass = weights_THK[:, :, t].sum(-1, keepdim=True)
            total, out = (
                (mass, part) if total is None or out is None else (total + mass, out + part)
            )
        assert total is not None
        assert out is not None
        # equal infinities differ by NaN, but weigh exactly one
        sink_mass = torch.where(sink_H1 == shift_TH1, 1.0, torch.exp(sink_H1 - shift_TH1))
        mass_TH1 = total + sink_mass
        lse_TH = (torch.log(total) + shift_TH1).squeeze(-1)
        return torch.where(mass_TH1 > 0, out / mass_TH1, 0.0), lse_TH
