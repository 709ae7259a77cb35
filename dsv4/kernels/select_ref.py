"""Select: the best K visible entries of each token, as table rows in ascending entry order.

Legend: T tokens, N entries, K picks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import SelectKernel
from dsv4.metadata.plans import ScoreInputs, SelectOutput


def ranking_keys(scores_TN: Tensor) -> Tensor:
    """int64 keys whose order is (score, then lower entry first), all distinct. NaN ranks with -inf."""
    scores = torch.where(scores_TN.isnan(), -torch.inf, scores_TN) + 0.0  # -0.0 ties with 0.0
    bits = scores.view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # sign and magnitude -> a line
    entry_N = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered << 32) - entry_N


class TorchSelect(SelectKernel):
    def select(
        self, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, *, first_token: int
    ) -> None:
        tokens = slice(first_token, first_token + scores_TN.shape[0])
        width = output.lane_TK.shape[1]
        if width == 0:
            return
        visible_T1 = inputs.num_visible_T[tokens].unsqueeze(1)
        lane_N = torch.arange(scores_TN.shape[1], device=scores_TN.device)
        keys = ranking_keys(scores_TN)
        # entries past n_vis rank below every visible one, also below a visible -inf
        keys = torch.where(lane_N < visible_T1, keys, torch.iinfo(torch.int64).min + lane_N)
        picked = keys.topk(width, dim=-1, sorted=False).indices
        picked = torch.where(picked < visible_T1, picked, scores_TN.shape[1])
        entry_TK = picked.sort(dim=-1).values.int()
        rows_TK = output.rows.rows(inputs.slot_T[tokens].unsqueeze(1), entry_TK)
        rows_TK = rows_TK.masked_fill(entry_TK >= visible_T1, -1)
        output.stream.indices_N[output.lane_TK[tokens].flatten().long()] = rows_TK.flatten()
