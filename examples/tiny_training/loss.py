"""Losses of one step. Legend: B sequences, S tokens of a sequence, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_training.data import ANSWER_WEIGHT, Batch
from tiny_training.dense import DenseOutput

DRAFT_WEIGHT = 0.3
"""Of the MTP block's loss: it shares the trunk, which must serve the main head first."""
METRICS = ("loss", "text", "answer", "recalled", "draft", "index")


def token_losses(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none"
    ).view_as(targets_BS)


def mean_where(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def step_loss(output: DenseOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    """-> (loss to differentiate, the values of METRICS)."""
    ids, weights = batch.ids_BS, batch.weights_BS
    logits = output.logits_BSV[:, :-1]
    targets, target_weights = ids[:, 1:], weights[:, 1:]
    losses = token_losses(logits, targets)
    loss = (losses * target_weights).mean()
    draft = index = torch.zeros((), device=ids.device)
    if output.draft_logits_BSV is not None:
        draft_losses = token_losses(output.draft_logits_BSV[:, :-2], ids[:, 2:])
        draft = (draft_losses * weights[:, 2:]).mean()
    if output.index_loss_BS is not None:
        # a query that must answer from memory teaches its indexer as much as it teaches the model
        index = (output.index_loss_BS[:, :-1] * target_weights).mean()
    total = loss + DRAFT_WEIGHT * draft + index
    with torch.no_grad():
        answer = (target_weights == ANSWER_WEIGHT).float()
        right = (logits.argmax(-1) == targets).float()
        metrics = torch.stack((
            loss, mean_where(losses, (target_weights == 1).float()), mean_where(losses, answer),
            mean_where(right, answer), draft, index,
        ))  # fmt: skip
    return total, metrics.detach()
