"""Tensors of safetensors files, listed from the headers and read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


@frozen(eq=False)
class StoredTensor:
    """A tensor that has not been read yet."""

    name: str
    dtype: torch.dtype | None
    """None: one that this library does not know."""
    dtype_name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    read_item: Callable[[int], Tensor]
    """One index of the first dim, without the others."""


def stored_in_memory(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Tensors that are there already, in the form of tensors of a file."""
    return {name: _in_memory(name, tensor) for name, tensor in tensors.items()}


def _in_memory(name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(
        name,
        tensor.dtype,
        str(tensor.dtype),
        tuple(tensor.shape),
        lambda: tensor,
        lambda index: tensor[index],
    )


def weight_files(path: Path) -> list[Path]:
    """The files of a checkpoint: one file, or a folder with an index, `model.safetensors` or other parts."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path}: no such file or folder; give a checkpoint folder"
        )
    if (path / INDEX_FILE).is_file():
        return sorted(path / file for file in set(read_index(path / INDEX_FILE).values()))
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"checkpoint {path}: holds no *.safetensors file; download the weights"
        )
    return files


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, of an index file."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not an index with a weight_map ({_reason(error)}); download it again"
        ) from error
    for file in files.values():
        if Path(file).name != file:
            raise CheckpointError(f"{path}: lists {file!r}; files must lie beside the index")
    return files


@contextmanager
def open_weights(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """All tensors of a checkpoint by their names in the files; readable inside the context.

    Raises CheckpointError for a file that is missing, truncated or corrupt, a name in two files, and a
    name of the index that its file does not hold.
    """
    with ExitStack() as stack:
        found: dict[str, StoredTensor] = {}
        place: dict[str, str] = {}
        for file in weight_files(path):
            for tensor in _open_file(stack, file):
                if tensor.name in found:
                    raise CheckpointError(
                        f"checkpoint {path}: {tensor.name} is in {place[tensor.name]} and in "
                        f"{file.name}; remove one of the files"
                    )
                found[tensor.name], place[tensor.name] = tensor, file.name
        if path.is_dir() and (path / INDEX_FILE).is_file():
            _check_index(path / INDEX_FILE, place)
        yield found


def _check_index(index: Path, place: Mapping[str, str]) -> None:
    lost = [f"{name} ({f})" for name, f in read_index(index).items() if place.get(name) != f]
    if lost:
        raise CheckpointError(
            f"{index}: not in the file it names: {', '.join(lost)}; download these files again"
        )


def _open_file(stack: ExitStack, file: Path) -> list[StoredTensor]:
    try:
        handle: Any = stack.enter_context(safe_open(file, framework="pt"))
        return [_describe(handle, file, name) for name in handle.keys()]  # noqa: SIM118  # no mapping
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file; download it") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file ({_reason(error)}); download it again"
        ) from error


def _describe(handle: Any, file: Path, name: str) -> StoredTensor:
    def guarded(read: Callable[[], Tensor]) -> Tensor:
        try:
            return read()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: {name} cannot be read ({_reason(error)}); download the file again"
            ) from error

    header = handle.get_slice(name)
    return StoredTensor(
        name,
        _DTYPES.get(header.get_dtype()),
        header.get_dtype(),
        tuple(header.get_shape()),
        lambda: guarded(lambda: handle.get_tensor(name)),
        lambda index: guarded(lambda: header[index]),
    )


def _reason(error: Exception) -> str:
    """First line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
