"""Writing a decoder's weights as a folder in the published checkpoint format.

Source: spec/checkpoint.md (names, number formats).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from dsv4.errors import CheckpointError
from dsv4.log import get_logger
from dsv4.model.tensor_names import PublishedTensor, scale_name
from dsv4.model.weight_files import INDEX_FILE, SINGLE_FILE
from dsv4.quant import encode_e8m0, pack_fp4, quantize_fp4, quantize_tiles

if TYPE_CHECKING:
    from dsv4.config import ModelConfig
    from dsv4.model.official import OfficialTensor

CONFIG_FILE = "config.json"

_log = get_logger(__name__)


class _WeightHolder(Protocol):
    def official_tensors(self) -> dict[str, OfficialTensor]: ...


def save_checkpoint(
    decoder: _WeightHolder,
    config: ModelConfig,
    path: str | Path,
    *,
    shard_bytes: int | None = None,
) -> None:
    """Write the folder `path`: config.json and the weights under published names, dtypes and scales.

    `shard_bytes` limits the tensor bytes of one file (a larger tensor gets a file of its own) and adds the index;
    None writes one `model.safetensors`. Values that the published dtype cannot hold are rounded to it. The folder
    appears whole or not at all.

    Raises CheckpointError if `path` exists and is not an empty folder, or a weight is not finite.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"checkpoint {path}: exists already; remove it or choose another path"
        )
    official = decoder.official_tensors()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
    unfinished.mkdir()
    try:
        total = _write_files(official, unfinished, shard_bytes)
        document = json.dumps(config.to_json(), indent=2)
        (unfinished / CONFIG_FILE).write_text(document + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _log.info("checkpoint_saved", path=str(path), num_tensors=len(official), nbytes=total)


def _write_files(
    official: Mapping[str, OfficialTensor], folder: Path, shard_bytes: int | None
) -> int:
    """Write all shards and, if asked for, the index; total bytes of the tensors."""
    shards = list(_shards(official, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    # disable=None: no bar unless standard error is a terminal.
    for i, names in enumerate(tqdm(shards, desc="save", unit="file", disable=None, leave=False)):
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= encode_tensor(name, official[name])
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        file = file if shard_bytes is not None else SINGLE_FILE
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if shard_bytes is not None:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _shards(official: Mapping[str, OfficialTensor], shard_bytes: int | None) -> Iterator[list[str]]:
    """Names of each file, in order; a weight and its scale stay together."""
    names: list[str] = []
    filled = 0
    for name, tensor in official.items():
        parts = PublishedTensor(name, tuple(tensor.view.shape), tensor.stored).parts()
        nbytes = sum(part.nbytes for part in parts)
        if names and shard_bytes is not None and filled + nbytes > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += nbytes
    yield names


def encode_tensor(name: str, tensor: OfficialTensor) -> dict[str, Tensor]:
    """What a file holds for a weight: the tensor in its published dtype, and its scale if it has one."""
    value = tensor.view.detach().cpu()
    if tensor.stored == "i64":
        return {name: value.to(torch.int64).clone()}
    if not value.isfinite().all():
        raise CheckpointError(
            f"{name}: holds NaN or infinity, which no checkpoint may; check the training run"
        )
    if tensor.stored in ("bf16", "fp32"):
        dtype = torch.bfloat16 if tensor.stored == "bf16" else torch.float32
        # A copy: safetensors refuses tensors that share memory, and fused parameters are one block of it.
        return {name: value.to(dtype, copy=True).contiguous()}
    if tensor.stored == "fp8":
        codes, scale = quantize_tiles(value)
    else:
        codes, scale = quantize_fp4(value)
        codes = pack_fp4(codes).view(torch.int8)
    stored_scale = encode_e8m0(scale).view(torch.float8_e8m0fnu)
    return {name: codes.contiguous(), scale_name(name): stored_scale}
