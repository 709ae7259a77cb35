"""Loading a checkpoint into a decoder: every tensor of the files is used exactly once, or nothing is loaded.

Source: spec/checkpoint.md (names, number formats).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from tqdm import tqdm

from dsv4.log import get_logger
from dsv4.model.checkpoint_writer import save_checkpoint
from dsv4.model.load_check import PACKED, Problems, check_tensor
from dsv4.model.official import OfficialTensor
from dsv4.model.tensor_names import FUSED_DOWN, FUSED_GATE_UP, official_name, scale_name
from dsv4.model.weight_files import StoredTensor, open_weights, stored_in_memory
from dsv4.quant import decode_e8m0, dequantize_fp4, dequantize_tiles, unpack_fp4

__all__ = ["WeightHolder", "has_drafts", "load_tensors", "load_weights", "save_checkpoint"]

_log = get_logger(__name__)


class WeightHolder(Protocol):
    """What is loaded: views of parameters under their published names."""

    def official_tensors(self) -> dict[str, OfficialTensor]: ...


def load_weights(decoder: WeightHolder, path: str | Path, *, ignore_drafts: bool = False) -> None:
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


def has_drafts(path: str | Path) -> bool:
    """Whether a checkpoint holds draft (MTP) weights; CheckpointError for an unreadable file."""
    with open_weights(Path(path)) as stored:
        return any(_is_draft(official_name(name)) for name in stored)


def _is_draft(name: str) -> bool:
    return name.startswith("mtp.")


@frozen(eq=False)
class _Copy:
    """One read of the files, a weight or one expert of a fused one, and the views that share its rows."""

    weight: StoredTensor
    scale: StoredTensor | None
    expert: int | None
    views: tuple[Tensor, ...]

    def run(self) -> None:
        values, start = self._values(self.views[0].device), 0
        for view in self.views:
            rows = view.shape[0]
            view.copy_(values[start : start + rows])
            start += rows

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
    official, problems = decoder.official_tensors(), Problems()
    skip_drafts = ignore_drafts and not any(map(_is_draft, official))
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        name = official_name(tensor.name)
        if skip_drafts and _is_draft(name):
            continue
        if name in tensors:
            problems.add("given twice", f"{tensors[name].name} and {tensor.name}")
        tensors[name] = tensor
    copies = _plan(official, tensors, problems)
    problems.raise_if_any(source)
    with torch.no_grad():
        # disable=None: no bar unless standard error is a terminal.
        for copy in tqdm(copies, desc="load", unit="tensor", disable=None, leave=False):
            copy.run()
    _log.info("weights_loaded", source=source, num_tensors=len(stored))


def _plan(
    official: Mapping[str, OfficialTensor],
    tensors: Mapping[str, StoredTensor],
    problems: Problems,
) -> list[_Copy]:
    """The copies that use every tensor once and fill every view once; what stands in the way of that
    goes to `problems`."""
    copies: list[_Copy] = []
    filled: dict[str, str] = {}
    used: set[str] = set()
    for name, weight in tensors.items():
        groups, fused = _targets(name, official)
        if not groups:
            continue
        scale = tensors.get(scale_name(name)) if name.endswith(".weight") else None
        views = [tuple(official[target].view for target in group) for group in groups]
        used.add(name)
        if check_tensor(weight, scale, views, fused=fused, problems=problems):
            used.add(scale_name(name))
        else:
            scale = None
        copies += [_Copy(weight, scale, e if fused else None, v) for e, v in enumerate(views)]
        for target in (target for group in groups for target in group):
            if target in filled:
                problems.add("given twice", f"{target} by {filled[target]} and {weight.name}")
            filled[target] = weight.name
    for name in official.keys() - filled.keys():
        problems.add("missing", name)
    for name in tensors.keys() - used:
        problems.add("surplus", tensors[name].name)
    return copies


def _targets(
    name: str, official: Mapping[str, OfficialTensor]
) -> tuple[list[tuple[str, ...]], bool]:
    """Published names that a tensor fills, in groups that lie in each other's rows; and whether the
    groups are the first dim of the tensor, one per expert."""
    if name in official:
        return [(name,)], False
    for suffix, parts in ((FUSED_GATE_UP, ("w1", "w3")), (FUSED_DOWN, ("w2",))):
        if name.endswith(suffix):
            prefix = f"{name.removesuffix(suffix)}experts."
            groups: list[tuple[str, ...]] = []
            while f"{prefix}{len(groups)}.{parts[0]}.weight" in official:
                groups.append(tuple(f"{prefix}{len(groups)}.{part}.weight" for part in parts))
            return groups, True
    return [], False
