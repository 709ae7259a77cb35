"""Indexer scores: sum_h w_h relu(q_h . key) over the visible entries (spec/architecture.md 3.7).

Legend: T tokens of one run, H index heads, D index dim, N entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.base import Rounding, ScoreKernel
from dsv4.kernels.store_ref import rounded
from dsv4.metadata.plans import ScoreInputs

KEY_TILE = 64
"""Keys per matrix product in deterministic mode: a product's bits depend on its shape, so the shape is fixed."""


def scores_of(q_THD: Tensor, weights_TH: Tensor, keys: Tensor) -> Tensor:
    """keys [N, D] shared by all tokens, or [T, N, D] -> [T, N]."""
    if keys.dim() == 2:
        dots_THN = (q_THD.flatten(0, 1) @ keys.t()).view(*q_THD.shape[:2], -1)
    else:
        dots_THN = torch.bmm(q_THD, keys.transpose(1, 2))
    return torch.bmm(weights_TH.unsqueeze(1), dots_THN.relu_()).squeeze(1)


def tiled_scores_of(q_THD: Tensor, weights_TH: Tensor, keys: Tensor) -> Tensor:
    """The same in products of one fixed shape, [H, D] x [D, KEY_TILE]."""
    num_tokens, num_keys = q_THD.shape[0], keys.shape[-2]
    tiles = -(-num_keys // KEY_TILE)
    padded = keys.new_zeros(*keys.shape[:-2], tiles * KEY_TILE, keys.shape[-1])
    padded[..., :num_keys, :] = keys
    out_TN = q_THD.new_empty(num_tokens, tiles * KEY_TILE)
    for tile in range(tiles):
        lanes = slice(tile * KEY_TILE, (tile + 1) * KEY_TILE)
        block = padded[..., lanes, :].expand(num_tokens, -1, -1)
        dots_THN = torch.bmm(q_THD, block.transpose(1, 2)).relu_()
        out_TN[:, lanes] = torch.bmm(weights_TH.unsqueeze(1), dots_THN).squeeze(1)
    return out_TN[:, :num_keys]


def key_rows(inputs: ScoreInputs, slots: Tensor, part: slice) -> Tensor:
    """[slots in part, N] legal key rows; what is no entry reads row 0 and is masked afterwards."""
    key = ("rows", slots.data_ptr(), part.start, part.stop)
    if key not in inputs.derived:
        entry_N = torch.arange(inputs.max_entries, dtype=torch.int32, device=slots.device)
        rows = inputs.keys.rows(slots[part].unsqueeze(1), entry_N)
        inputs.derived[key] = rows.clamp_(min=0)
    return inputs.derived[key]


def hidden_entries(inputs: ScoreInputs, tokens: slice) -> Tensor:
    """bool [T, N]: entries past n_vis."""
    key = ("hidden", tokens.start, tokens.stop)
    if key not in inputs.derived:
        visible_T1 = inputs.num_visible_T[tokens].unsqueeze(1)
        entry_N = torch.arange(inputs.max_entries, dtype=torch.int32, device=visible_T1.device)
        inputs.derived[key] = entry_N >= visible_T1
    return inputs.derived[key]


class TorchScore(ScoreKernel):
    def __init__(self, *, deterministic: bool = False) -> None:
        self._scores = tiled_scores_of if deterministic else scores_of

    def round_queries(self, q_THD: Tensor, rounding: Rounding) -> Tensor:
        return rounded(q_THD, rounding, rope_dim=0, value_dtype=q_THD.dtype).float()

    def score(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        inputs: ScoreInputs,
        *,
        first_token: int,
        out_TN: Tensor,
    ) -> None:
        tokens = slice(first_token, first_token + q_THD.shape[0])
        if max(inputs.query_lengths, default=0) <= 1:
            keys = inputs.view.read(key_rows(inputs, inputs.slot_T, tokens))
            out_TN.copy_(self._scores(q_THD, weights_TH, keys))
        else:
            self._score_runs(q_THD, weights_TH, inputs, first_token, out_TN)
        out_TN.masked_fill_(hidden_entries(inputs, tokens), -torch.inf)

    def _score_runs(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        inputs: ScoreInputs,
        first_token: int,
        out_TN: Tensor,
    ) -> None:
        """Tokens of one request stand together and share its keys: read them once."""
        end = 0
        out_TN.fill_(-torch.inf)
        for request, num in enumerate(inputs.query_lengths):
            start, end = end, end + num
            run = slice(max(start - first_token, 0), min(end - first_token, q_THD.shape[0]))
            if run.start >= run.stop:
                continue
            one = slice(request, request + 1)
            keys_ND = inputs.view.read(key_rows(inputs, inputs.request_slots_B, one)[0])
            out_TN[run] = self._scores(q_THD[run], weights_TH[run], keys_ND)
