"""Loading a checkpoint into a decoder: every tensor of the files is used exactly once, or nothing is loaded.

Source: spec/checkpoint.md (names, number formats).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from attrs import Factory, define, frozen
from torch import Tensor
from tqdm import tqdm

from dsv4.errors import CheckpointError
from dsv4.log import get_logger
from dsv4.model.checkpoint_writer import save_checkpoint
from dsv4.model.official import OfficialTensor
from dsv4.model.tensor_names import (
    FUSED_DOWN,
    FUSED_GATE_UP,
    block_grid,
    official_name,
    scale_name,
    tile_grid,
)
from dsv4.model.weight_files import StoredTensor, open_weights, stored_in_memory
from dsv4.quant import decode_e8m0, dequantize_fp4, dequantize_tiles, unpack_fp4

__all__ = ["WeightHolder", "load_tensors", "load_weights", "save_checkpoint"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PACKED = (torch.int8, torch.uint8)
SCALES = (torch.float8_e8m0fnu, torch.float32)
MOST_NAMES = 200
"""Names that an error lists of one kind: with a wrong config all of 69,187 tensors may be wrong."""

_log = get_logger(__name__)


class WeightHolder(Protocol):
    """What is loaded: views of parameters under their published names."""

    def official_tensors(self) -> dict[str, OfficialTensor]: ...


def load_weights(
    decoder: WeightHolder, path: str | Path, *, ignore_drafts: bool = False
) -> None:
    """Copy a checkpoint's values into a decoder.

    `path` is a safetensors file, or a folder with an index, `model.safetensors` or any safetensors files.
    Names: published or transformers, also fused experts. Values: F32, BF16, F16; F8_E4M3 with F8_E8M0 or
    F32 scales per 128 x 128 tile; packed fp4 (I8) with such scales per 1 x 32. `ignore_drafts` skips
    `mtp.*` tensors of a decoder without draft layers.

    Raises CheckpointError for an unreadable file, and one that lists every missing, surplus, mis-shaped
    and scale-less tensor; no value has been copied then.
    """
    with open_weights(Path(path)) as stored:
        _load(decoder, stored, f"checkpoint {path}", ignore_drafts)


def load_tensors(
    decoder: WeightHolder, tensors: Mapping[str, Tensor], *, ignore_drafts: bool = False
) -> None:
    """`load_weights` from tensors in memory, by name."""
    _load(decoder, stored_in_memory(tensors), "tensors", ignore_drafts)


@define
class _Problems:
    """All that is wrong with a checkpoint, by kind."""

    lists: dict[str, list[str]] = Factory(dict)

    def add(self, kind: str, text: str) -> None:
        self.lists.setdefault(kind, []).append(text)

    def raise_if_any(self, source: str) -> None:
        if not self.lists:
            return
        found = "; ".join(f"{kind}: {_listed(names)}" for kind, names in self.lists.items())
        raise CheckpointError(f"{source} does not fit the model: {found}; check config.json")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


@frozen(eq=False)
class _Copy:
    """One read of a file: a matrix, or one expert of a fused tensor, and the views that share its rows."""

    weight: StoredTensor
    scale: StoredTensor | None
    expert: int | None
    views: tuple[Tensor, ...]

    def run(self) -> None:
        values = self._values(self.views[0].device)
        start = 0
        for view in self.views:
            rows = values[start : start + view.shape[0]] if len(self.views) > 1 else values
            view.copy_(rows)
            start += view.shape[0]

    def _values(self, device: torch.device) -> Tensor:
        weight = self._read(self.weight).to(device)
        if self.scale is None:
            return weight
        scale = self._read(self.scale).to(device)
        if scale.dtype == torch.float8_e8m0fnu:
            scale = decode_e8m0(scale)
        if weight.dtype in PACKED:
            return dequantize_fp4(unpack_fp4(weight), scale)
        return dequantize_tiles(weight, scale)

    def _read(self, tensor: StoredTensor) -> Tensor:
        return tensor.read() if self.expert is None else tensor.read_item(self.expert)


def _load(
    decoder: WeightHolder, stored: Mapping[str, StoredTensor], source: str, ignore_drafts: bool
) -> None:
    copies = _plan(decoder.official_tensors(), stored, source, ignore_drafts)
    with torch.no_grad():
        # disable=None: no bar unless standard error is a terminal.
        for copy in tqdm(copies, desc="load", unit="tensor", disable=None, leave=False):
            copy.run()
    _log.info("weights_loaded", source=source, num_tensors=len(stored))


def _plan(
    official: Mapping[str, OfficialTensor],
    stored: Mapping[str, StoredTensor],
    source: str,
    ignore_drafts: bool,
) -> list[_Copy]:
    """Match every stored tensor with views; raises with all problems at once."""
    problems = _Problems()
    skip_drafts = ignore_drafts and not any(name.startswith("mtp.") for name in official)
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        name = official_name(tensor.name)
        if skip_drafts and name.startswith("mtp."):
            continue
        if name in tensors:
            problems.add("given twice", f"{tensors[name].name} and {tensor.name}")
        tensors[name] = tensor
    copies: list[_Copy] = []
    missing, used = dict.fromkeys(official), set[str]()
    for name, tensor in tensors.items():
        targets = _targets(name, official)
        if targets is None:
            continue
        scale = tensors.get(scale_name(name)) if name.endswith(".weight") else None
        used |= {name} if scale is None else {name, scale_name(name)}
        _check(tensor, scale, targets, problems)
        copies += _copies(tensor, scale, targets)
        for target in (target for group in targets for target in group):
            if target not in missing:
                problems.add("given twice", f"{target} and {tensor.name}")
            missing.pop(target, None)
    return copies
