"""Attend: one softmax over the rows of all sources, and a sink in the denominator (spec/architecture.md 3.4).

Legend: T tokens of a tile, H heads, D head dim, K lanes (all sources, side by side).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import AttentionKernel
from dsv4.kernels.rope_ref import rotate
from dsv4.metadata.plans import RopeTable, Source, Workspace

TILE_VALUES = 1 << 20  # gathered values per token tile: 4 MiB in fp32, a CPU's L2
LANE_TILE = 64
"""Lanes per matrix product in deterministic mode. A segment starts on a tile border, so a token's tiles do not depend
on how wide other tokens' segments are; a tile without rows adds exact zeros."""


@frozen(eq=False)
class PaddedRows:
    """A tile's ragged lists as a matrix: legal rows, and which lanes are no row (those read row 0)."""

    row_TK: Tensor
    hidden_TK: Tensor


def padded_rows(source: Source, first: int, last: int, lane_tile: int) -> PaddedRows:
    """Lists of tokens [first, last), padded to a multiple of lane_tile."""
    stream, width = source.stream, -(-source.stream.max_rows // lane_tile) * lane_tile
    fresh_rows = 0 if source.fresh_TD is None else source.fresh_TD.shape[0]
    key = (first, last, width, source.view.num_rows + fresh_rows)
    made = stream.derived.get(key)
    if isinstance(made, PaddedRows):
        return made
    start_T1 = stream.indptr_T1[first:last].unsqueeze(1)
    lane_TK = start_T1 + torch.arange(width, dtype=torch.int32, device=start_T1.device)
    hidden_TK = lane_TK >= stream.indptr_T1[first + 1 : last + 1].unsqueeze(1)
    lane_TK = lane_TK.clamp_(max=max(stream.indices_N.shape[0] - 1, 0))
    row_TK = stream.indices_N[lane_TK.long()]
    hidden_TK |= (row_TK < 0) | (row_TK >= source.view.num_rows + fresh_rows)
    made = PaddedRows(row_TK.masked_fill_(hidden_TK, 0), hidden_TK)
    if stream.final:
        stream.derived[key] = made
    return made


def gather(source: Source, rows: PaddedRows) -> Tensor:
    """Values [T, K, D] fp32 of a tile's lanes, zero where there is no row."""
    view, fresh_TD = source.view, source.fresh_TD
    if fresh_TD is None:
        values = view.read(rows.row_TK)
    else:
        is_fresh = rows.row_TK >= view.num_rows
        fresh = fresh_TD[(rows.row_TK - view.num_rows).clamp_(min=0).long()]
        stored = view.read(rows.row_TK.masked_fill(is_fresh, 0))
        values = torch.where(is_fresh.unsqueeze(-1), fresh, stored)
    # whatever a lane that is no row read (poison included) must not reach the products
    return values.masked_fill_(rows.hidden_TK.unsqueeze(-1), 0.0)


def _angles_of(rope: RopeTable, first: int, last: int) -> RopeTable:
    """The angles of tokens [first, last); all of them keep the table, which remembers what is derived from it."""
    if last - first == rope.cos_TP.shape[0]:
        return rope
    return RopeTable(rope.cos_TP[first:last], rope.sin_TP[first:last])


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
        rope: RopeTable | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        num_tokens, dim = q_THD.shape[0], q_THD.shape[-1]
        sources = [s for s in sources if s.stream.max_rows]
        if not sources:
            out_THD.zero_()
            if lse_TH is not None:
                lse_TH.fill_(-torch.inf)
            return
        lanes = sum(s.stream.max_rows + self._lane_tile for s in sources)
        tile = max(1, TILE_VALUES // (lanes * dim))
        for first in range(0, num_tokens, tile):
            last = min(first + tile, num_tokens)
            rows = [padded_rows(s, first, last, self._lane_tile) for s in sources]
            values = [gather(s, r) for s, r in zip(sources, rows, strict=True)]
            hidden = [r.hidden_TK for r in rows]
            values_TKD = torch.cat(values, 1) if len(values) > 1 else values[0]
            hidden_TK = torch.cat(hidden, 1) if len(hidden) > 1 else hidden[0]
            scores_THK = self._scores(q_THD[first:last], values_TKD).mul_(scale)
            scores_THK.masked_fill_(hidden_TK.unsqueeze(1), -torch.inf)
            out_tHD = self._weighted(scores_THK, values_TKD, sink_H)
            if rope is not None:
                out_tHD = rotate(out_tHD, _angles_of(rope, first, last), inverse=True)
            out_THD[first:last] = out_tHD
            if lse_TH is not None:
                lse_TH[first:last] = torch.logsumexp(scores_THK, -1)

    def _tiles(self, width: int) -> list[slice]:
        step = width if self._lane_tile == 1 else self._lane_tile
        return [slice(a, a + step) for a in range(0, width, step)]

    def _scores(self, q_THD: Tensor, values_TKD: Tensor) -> Tensor:
        q_THD, keys_TDK = q_THD.to(values_TKD.dtype), values_TKD.transpose(1, 2)
        parts = [torch.bmm(q_THD, keys_TDK[:, :, t]) for t in self._tiles(values_TKD.shape[1])]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _weighted(self, scores_THK: Tensor, values_TKD: Tensor, sink_H: Tensor) -> Tensor:
        sink_H1 = sink_H.to(scores_THK.dtype).unsqueeze(-1)
        # the sink takes part in the maximum; finite, so that no difference of equal infinities arises
        finite = torch.finfo(scores_THK.dtype)
        shift_TH1 = torch.maximum(scores_THK.amax(-1, keepdim=True), sink_H1)
        shift_TH1.clamp_(finite.min, finite.max)
        weights_THK = torch.exp(scores_THK - shift_TH1)
        mass_TH1 = torch.exp(sink_H1 - shift_TH1)
        total, out = None, None
        for t in self._tiles(values_TKD.shape[1]):
            mass = weights_THK[:, :, t].sum(-1, keepdim=True)
            part = torch.bmm(weights_THK[:, :, t], values_TKD[:, t])
            total = mass if total is None else total + mass
            out = part if out is None else out + part
        assert total is not None
        assert out is not None
        # without rows and without a sink there is no mass at all: 0 / tiny, an empty row
        return out / (mass_TH1 + total).clamp_(min=finite.tiny)
