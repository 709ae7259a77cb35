"""Published tensors as views of this library's parameters.

Parameters are fused where one GEMM serves several published weights, so a published tensor is a *view*: loading copies
into it, saving reads it, and each parameter element belongs to exactly one published tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from attrs import frozen
from torch import Tensor, nn

Stored = Literal["bf16", "fp32", "fp8", "fp4", "i64"]


@frozen(eq=False)
class OfficialTensor:
    """`view` has the published shape; `stored` is the published dtype (fp8 and fp4 bring a scale tensor)."""

    view: Tensor
    stored: Stored


class OfficialModule(nn.Module):
    """A module that knows the published names of its own parameters."""

    def own_tensors(self) -> Iterator[tuple[str, OfficialTensor]]:
        """(published suffix, view) of the parameters held here, children excluded."""
        return iter(())

    def published_children(self) -> Iterator[tuple[str, OfficialModule]]:
        """(published prefix, child). The default takes the attribute names."""
        for name, child in self.named_children():
            if isinstance(child, OfficialModule):
                yield name, child

    def official_tensors(self) -> dict[str, OfficialTensor]:
        """Every published tensor below this module, by its published name (spec/checkpoint.md)."""
        found = dict(self.own_tensors())
        for prefix, child in self.published_children():
            joint = f"{prefix}." if prefix else ""
            found.update({joint + name: t for name, t in child.official_tensors().items()})
        return found


def frozen_parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient: this is an inference library; a trainer turns gradients on itself."""
    return nn.Parameter(tensor, requires_grad=False)
