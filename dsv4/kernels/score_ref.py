"""Indexer scores: sum_h w_h relu(q_h . key) over the visible entries (spec/architecture.md 3.7).

Legend: T tokens of one run, H index heads, D index dim, N entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dsv4.kernels.base import Rounding, ScoreKernel
from dsv4.kernels.rope_ref import rotate
from dsv4.kernels.store_ref import rounded
from dsv4.metadata.plans import RopeTable, ScoreInputs
from dsv4.pool.base import KVView
from dsv4.pool.formats import IndexFp8Rows
from dsv4.quant import round_fp8

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


def once(inputs: ScoreInputs, key: object, make: Callable[[], Tensor]) -> Tensor:
    """What `make` returns, made once for all layers of a forward, unless its scores take several tiles: kept for each
    tile it would add up to a matrix like the one that the score budget avoids."""
    if inputs.num_visible_T.shape[0] > inputs.tile_tokens:
        return make()
    if key not in inputs.derived:
        inputs.derived[key] = make()
    return inputs.derived[key]


def key_rows(inputs: ScoreInputs, slots: Tensor) -> Tensor:
    """[slots, N] legal key rows; what is no entry reads row 0 and is masked afterwards."""
    entry_N = torch.arange(inputs.max_entries, dtype=torch.int32, device=slots.device)
    return inputs.keys.rows(slots.unsqueeze(1), entry_N).clamp_(min=0)


def hidden_entries(inputs: ScoreInputs, tokens: slice) -> Tensor:
    """bool [T, N]: entries past n_vis."""
    visible_T1 = inputs.num_visible_T[tokens].unsqueeze(1)
    entry_N = torch.arange(inputs.max_entries, dtype=torch.int32, device=visible_T1.device)
    return entry_N >= visible_T1


class TorchScore(ScoreKernel):
    def __init__(self, *, deterministic: bool = False) -> None:
        self._scores = tiled_scores_of if deterministic else scores_of

    def queries(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        *,
        rope: RopeTable,
        rounding: Rounding,
        scale: float,
        view: KVView,
    ) -> tuple[Tensor, Tensor]:
        q_THD = rotate(q_THD, rope)
        q_THD = rounded(q_THD, rounding, rope_dim=0, value_dtype=q_THD.dtype).float()
        if isinstance(view.format, IndexFp8Rows):
            q_THD = round_fp8(q_THD.bfloat16().float(), q_THD.shape[-1])
        return q_THD, weights_TH * scale

    def score(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        inputs: ScoreInputs,
        *,
        first_token: int,
        out_TN: Tensor,
    ) -> None:
        end = first_token + q_THD.shape[0]
        tokens = slice(first_token, end)
        if max(inputs.query_lengths, default=0) <= 1:
            slots_T = inputs.slot_T[tokens]
            rows_TN = once(inputs, ("rows", first_token, end), lambda: key_rows(inputs, slots_T))
            out_TN.copy_(self._scores(q_THD, weights_TH, inputs.view.read(rows_TN)))
        else:
            self._score_runs(q_THD, weights_TH, inputs, first_token, out_TN)
        key = ("hidden", first_token, end)
        hidden_TN = once(inputs, key, lambda: hidden_entries(inputs, tokens))
        out_TN.masked_fill_(hidden_TN, -torch.inf)

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
            slot = inputs.request_slots_B[request : request + 1]
            rows_1N = once(inputs, ("request", request), partial(key_rows, inputs, slot))
            keys_ND = inputs.view.read(rows_1N[0])
            out_TN[run] = self._scores(q_THD[run], weights_TH[run], keys_ND)
