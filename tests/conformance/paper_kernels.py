"""A third party's kernel set, as its package would hold it: an own select, the rest from the torch set."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from dsv4.config import ModelConfig, PoolConfig
from dsv4.kernels.base import KernelFamily, KernelSet, SelectKernel
from dsv4.kernels.torch_set import TorchKernels
from dsv4.metadata.plans import ScoreInputs, SelectOutput


class PaperSelect(SelectKernel):
    """One token after the other, with Python's sort."""

    def select(
        self, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, *, first_token: int
    ) -> None:
        for t, scores in enumerate(scores_TN.masked_fill(scores_TN.isnan(), -torch.inf).tolist()):
            token = first_token + t
            visible = int(inputs.num_visible_T[token])
            order = sorted(range(visible), key=lambda e: -scores[e])
            picks = sorted(order[: output.lane_TK.shape[1]])
            lanes = output.lane_TK[token].long()
            output.stream.indices_N[lanes] = -1
            if picks:
                entries = torch.tensor(picks, dtype=torch.int32, device=scores_TN.device)
                rows = output.rows.rows(inputs.slot_T[token : token + 1], entries)
                output.stream.indices_N[lanes[: len(picks)]] = rows


class PaperKernels(KernelFamily):
    name = "paper"

    @classmethod
    def why_not(
        cls, device: torch.device, model: ModelConfig, pool_config: PoolConfig
    ) -> str | None:
        return None if device.type == "cpu" else "paper cannot be pushed into a GPU"

    @classmethod
    def build(cls, *, deterministic: bool) -> KernelSet:
        torch_set = TorchKernels.build(deterministic=deterministic)
        return attrs.evolve(torch_set, name=cls.name, select=PaperSelect())
