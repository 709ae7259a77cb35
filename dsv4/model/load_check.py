"""Whether stored tensors fit the views they are for, with all misfits collected in one error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.model.tensor_names import block_grid, tile_grid
from dsv4.model.weight_files import StoredTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PACKED = (torch.int8, torch.uint8)
SCALES = (torch.float8_e8m0fnu, torch.float32)
MOST_NAMES = 5
"""Names that an error lists of one kind: under a wrong config, all of 69,187 may be wrong."""


class Problems:
    """All that is wrong with a checkpoint, by kind."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        self._found.setdefault(kind, []).append(text)

    def raise_if_any(self, source: str) -> None:
        """CheckpointError in one line with every problem, unless there is none."""
        if not self._found:
            return
        parts = []
        for kind, names in self._found.items():
            listed = ", ".join(sorted(names)[:MOST_NAMES])
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            parts.append(f"{kind} ({len(names)}): {listed}{more}")
        raise CheckpointError(
            f"{source} does not fit the model: {'; '.join(parts)}; "
            "use the config.json and all files of one release"
        )


def check_tensor(
    weight: StoredTensor,
    scale: StoredTensor | None,
    views: Sequence[Sequence[Tensor]],
    *,
    fused: bool,
    problems: Problems,
) -> bool:
    """Note what does not fit; True if the weight is one that needs a scale.

    `views` are the targets, in groups that share a matrix; `fused` = one group per index of dim 0.
    """
    first = views[0][0]
    rows = sum(view.shape[0] for view in views[0])
    wanted = (len(views), rows, *first.shape[1:]) if fused else tuple(first.shape)
    if not first.is_floating_point():
        _check_dtype(weight, (torch.int64, torch.int32), problems)
        _check_shape(weight, wanted, problems)
        return False
    if weight.dtype == torch.float8_e4m3fn and len(wanted) > 1:
        _check_shape(weight, wanted, problems)
        _check_scale(weight, scale, tile_grid(wanted), problems)
        return True
    if weight.dtype in PACKED and len(wanted) > 1:
        # Two values per byte; an odd width has no packed form.
        _check_shape(weight, (*wanted[:-1], wanted[-1] / 2), problems)
        _check_scale(weight, scale, block_grid(wanted), problems)
        return True
    _check_dtype(weight, FLOATS, problems)
    _check_shape(weight, wanted, problems)
    return False


def _check_shape(tensor: StoredTensor, wanted: tuple[float, ...], problems: Problems) -> None:
    if tensor.shape != wanted:
        got, want = ([f"{width:g}" for width in shape] for shape in (tensor.shape, wanted))
        problems.add(
            "wrong shape", f"{tensor.name} [{', '.join(got)}] instead of [{', '.join(want)}]"
        )


def _check_dtype(
    tensor: StoredTensor, allowed: tuple[torch.dtype, ...], problems: Problems
) -> None:
    if tensor.dtype not in allowed:
        problems.add("wrong dtype", f"{tensor.name} {tensor.dtype_name}")


def _check_scale(
    weight: StoredTensor,
    scale: StoredTensor | None,
    wanted: tuple[int, ...],
    problems: Problems,
) -> None:
    if scale is None:
        problems.add("missing scale", weight.name)
        return
    _check_dtype(scale, SCALES, problems)
    _check_shape(scale, wanted, problems)
