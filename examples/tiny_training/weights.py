"""Weights before and during training: initial values, and rounding to the published formats.

Training keeps fp32 masters; the model itself always holds what its checkpoint would hold, so that gradients are taken
at the stored values (straight-through) and the shipped file is exactly the model that was evaluated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4.model.decoder import Decoder
from dsv4.model.official import OfficialTensor
from dsv4.quant import dequantize_tiles, quantize_tiles, round_fp4

EMBEDDING_STD = 0.5
COMB_DIAGONAL = 2.0
"""Initial bias towards keeping streams apart: with none, 20 Sinkhorn steps average all streams into one."""


def initialise(model: Decoder, seed: int) -> None:
    """Fan-in scaled normals; output projections smaller, by the depth; hyper-connections close to static."""
    rng = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=rng) * std)

    depth = (2 * len(model.config.layers)) ** -0.5
    for name, target in model.official_tensors().items():
        view, leaf = target.view, name.rsplit(".", 1)[-1]
        if leaf in ("bias", "attn_sink"):
            view.zero_()
        elif leaf == "tid2eid":
            experts = model.config.n_routed_experts
            order = torch.rand(len(view), experts, generator=rng).argsort(-1)
            view.copy_(order[:, : view.shape[1]])
        elif name == "head.weight":
            # near uniform guesses at first
            fill(view, 0.2 * view.shape[1] ** -0.5)
        elif name == "embed.weight":
            fill(view, EMBEDDING_STD)
        elif leaf == "ape":
            fill(view, 0.1)
        elif "hc_" in leaf:
            _initialise_mix(view, leaf, model.config.hc_mult, fill)
        elif view.dim() == 2:
            last = any(part in name for part in ("wo_b.", ".w2."))
            fill(view, view.shape[1] ** -0.5 * (depth if last else 1.0))


def _initialise_mix(view: Tensor, leaf: str, n: int, fill: object) -> None:
    if leaf.endswith("_fn"):
        assert callable(fill)
        fill(view, view.shape[1] ** -0.5)
    elif leaf.endswith("_scale"):
        view.fill_(0.1)
    else:
        view.zero_()
        if view.numel() > n:
            view[2 * n :].view(n, n).fill_diagonal_(COMB_DIAGONAL)


def rounded(target: OfficialTensor) -> Tensor:
    """The values that the published format would give back."""
    view = target.view
    if target.stored == "fp8":
        return dequantize_tiles(*quantize_tiles(view))
    if target.stored == "fp4":
        return round_fp4(view)
    return view.to(torch.bfloat16).float() if target.stored == "bf16" else view


def round_as_stored(model: Decoder) -> None:
    """Round every weight to its published format in place; rounding again changes nothing."""
    for target in model.official_tensors().values():
        target.view.copy_(rounded(target))


def trainable(model: Decoder) -> dict[str, nn.Parameter]:
    """Every floating point parameter with elements, but the router's selection bias: no weight of the output."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel() and not name.endswith("gate.bias")
    }
