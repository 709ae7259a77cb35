"""Compress: pool the tokens of each closing window into one entry (spec/architecture.md 3.5).

Legend: T tokens, E closing windows, S fold segments (E, then one per request), J fold steps,
M pooled tokens (2 * ratio), C channels of `kv` or `gate` as projected, D channels of an entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import CompressKernel, Rounding
from dsv4.kernels.rope_ref import rotate
from dsv4.kernels.store_ref import normed, rounded
from dsv4.metadata.plans import CompressorTarget, FoldPlan, OverlapPlan, RopeTable
from dsv4.pool.base import KVView
from dsv4.pool.fold import fold_step


def add_position_bias(projected_TC: Tensor, ape_MC: Tensor, ape_row_T: Tensor) -> Tensor:
    """Raw rows `kv | gate + ape` as the state keeps them, fp32."""
    rows = projected_TC.clone()
    rows[:, ape_MC.shape[1] :] += ape_MC.index_select(0, ape_row_T)
    return rows


def gather_raw(view: KVView, own_TC: Tensor, source: Tensor) -> Tensor:
    """Raw rows of `source`: state rows below view.num_rows, own tokens above; what is no row reads row 0 of either."""
    if own_TC.shape[0] == 0:
        return view.read(source.clamp(min=0))
    is_own = source >= view.num_rows
    state = view.read(torch.where(is_own, 0, source).clamp_(min=0))
    own = own_TC[(source - view.num_rows).clamp_(min=0).long()]
    return torch.where(is_own.unsqueeze(-1), own, state)


def write_entries(
    pooled_ED: Tensor, *, norm: Tensor, eps: float, rope: RopeTable, target: CompressorTarget, rounding: Rounding
) -> None:  # fmt: skip
    """Norm, rotate, round and scatter pooled entries."""
    entries = rotate(normed(pooled_ED, eps) * norm, rope)
    view = target.entry_view
    rope_dim = 2 * rope.cos_TP.shape[-1]
    entries = rounded(entries, rounding, rope_dim=rope_dim, value_dtype=view.format.value_dtype)
    view.write(target.entry_loc_E, entries)


def ordered_sum(values_EMD: Tensor) -> Tensor:
    """Sum over M in token order: left to right, whatever the batch."""
    total = values_EMD[:, 0].clone()
    for j in range(1, values_EMD.shape[1]):
        total += values_EMD[:, j]
    return total


class TorchCompress(CompressKernel):
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
        own_TC = add_position_bias(projected_TC, ape_MC, plan.ape_row_T)
        if plan.source_EM.shape[0]:
            dim, m = norm.shape[0], plan.ratio
            raw_EMC = gather_raw(target.state_view, own_TC, plan.source_EM)
            # A halves of the window before, B halves of the own one
            kv_EMD = torch.cat([raw_EMC[:, :m, :dim], raw_EMC[:, m:, dim : 2 * dim]], dim=1)
            gate_EMD = torch.cat([raw_EMC[:, :m, 2 * dim : 3 * dim], raw_EMC[:, m:, 3 * dim :]], 1)
            absent = (plan.source_EM < 0).unsqueeze(-1)
            gate_EMD = gate_EMD.masked_fill_(absent, -torch.inf)
            kv_EMD = kv_EMD.masked_fill_(absent, 0.0)
            # all 2m gates are at hand, so the fold's maximum is known before its first step
            weight_EMD = torch.exp(gate_EMD - gate_EMD.amax(1, keepdim=True))
            pooled = ordered_sum(weight_EMD * kv_EMD) / ordered_sum(weight_EMD)
            write_entries(
                pooled, norm=norm, eps=eps, rope=plan.entry_rope, target=target, rounding=rounding
            )
        target.state_view.write(plan.state_loc_T, own_TC)

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
        accumulators = target.accumulator_view
        assert accumulators is not None
        own_TC = add_position_bias(projected_TC, ape_MC, plan.ape_row_T)
        old = accumulators.read(plan.accumulator_row_S.clamp(min=0))
        state, folded_S = self._resume(old, plan)
        raw_SJC = gather_raw(target.state_view, own_TC, plan.source_SJ)
        value_SJD, gate_SJD = raw_SJC.chunk(2, dim=-1)
        # tokens that the accumulator holds already, and lanes without a token, weigh nothing
        skip = (plan.source_SJ < 0) | (plan.position_SJ < folded_S.unsqueeze(1))
        gate_SJD = gate_SJD.masked_fill(skip.unsqueeze(-1), -torch.inf)
        for j in range(gate_SJD.shape[1]):
            state = fold_step(*state, gate_SJD[:, j], value_SJD[:, j])
        num_closing = plan.source_SJ.shape[0] - plan.accumulator_loc_B.shape[0]
        if num_closing:
            pooled = state[2][:num_closing] / state[1][:num_closing]
            write_entries(
                pooled, norm=norm, eps=eps, rope=plan.entry_rope, target=target, rounding=rounding
            )
        advanced = torch.cat(
            [*(part[num_closing:] for part in state), plan.folded_B[:, None].float()], -1
        )
        done = (folded_S[num_closing:] >= plan.folded_B).unsqueeze(1)
        accumulators.write(plan.accumulator_loc_B, torch.where(done, old[num_closing:], advanced))
        target.state_view.write(plan.state_loc_T, own_TC)

    @staticmethod
    def _resume(old_SC: Tensor, plan: FoldPlan) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Fold state at each segment's start, and the tokens that the slot's accumulator has folded."""
        folded_S = torch.where(plan.accumulator_row_S >= 0, old_SC[:, -1], 0.0)
        holds = (folded_S > plan.start_S).unsqueeze(1)
        maximum, total, weighted = old_SC[:, :-1].chunk(3, dim=-1)
        return (
            torch.where(holds, maximum, -torch.inf),
            torch.where(holds, total, 0.0),
            torch.where(holds, weighted, 0.0),
        ), folded_S
