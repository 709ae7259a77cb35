"""Reading a golden folder: its config, its stored tensors, and which of them have been looked at.

The layout is that of the folders made from the reference implementation: `config.json`, `weights.safetensors`, one
`prompt{i}_len{S}.safetensors` per prompt, and optionally `rope`, `mtp` and `primitives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dsv4.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "weights.safetensors"
ROPE = "rope.safetensors"
DRAFT = "mtp.safetensors"
PRIMITIVES = "primitives.safetensors"


class StoredTensors:
    """The tensors of one file. Remembers which were taken, so that none can be forgotten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.subject = path.stem
        self._tensors = read_tensors(path)
        self._untaken = dict.fromkeys(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> Tensor:
        """A stored tensor, marked as looked at. Raises CheckpointError if the file lacks it."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; make the file again")
        self._untaken.pop(name, None)
        return self._tensors[name]

    def named(self, prefix: str) -> Iterator[str]:
        """Names of the stored tensors that start with `prefix`, in the order of the file."""
        return (name for name in self._tensors if name.startswith(prefix))

    @property
    def untaken(self) -> tuple[str, ...]:
        return tuple(self._untaken)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; CheckpointError if it is missing or corrupt."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; give a whole golden folder") from error
    except (SafetensorError, OSError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({reason}); copy or make it again"
        ) from error


def golden_folders(path: Path) -> list[Path]:
    """The folder itself and those right below it, as far as they hold golden data. Raises CheckpointError if none."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a golden folder")
    below = sorted(child for child in path.iterdir() if child.is_dir())
    found = [folder for folder in (path, *below) if _is_golden(folder)]
    if not found:
        raise CheckpointError(
            f"{path}: holds no golden data ({CONFIG} with {WEIGHTS} and prompts, or {PRIMITIVES}); "
            "give a golden folder"
        )
    return found


def has_model(folder: Path) -> bool:
    """Whether the folder holds a model and prompts."""
    return bool(prompt_files(folder))


def prompt_files(folder: Path) -> list[Path]:
    """The prompts' files, in the order of their numbers."""
    files = folder.glob("prompt*_len*.safetensors")
    return sorted(files, key=lambda file: (len(file.stem.partition("_")[0]), file.stem))


def _is_golden(folder: Path) -> bool:
    return has_model(folder) or (folder / PRIMITIVES).is_file()
