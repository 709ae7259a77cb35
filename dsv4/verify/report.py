"""What a verification found: one `Check` per compared tensor, collected in a `Report`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Tolerance:
    """|got - want| <= absolute + relative * |want|, elementwise. Both 0: bit for bit."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        return self.absolute == 0 and self.relative == 0

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        if math.isinf(self.absolute):
            return "reported"
        parts = [f"{self.absolute:g}"] if self.absolute else []
        parts += [f"{self.relative:g}*|x|"] if self.relative else []
        return " + ".join(parts)


@frozen
class MostOf(Tolerance):
    """All but a `spared` fraction of the values lie within `of_largest` times the tensor's largest magnitude."""

    of_largest: float = 0.0
    spared: float = 0.0

    @property
    def exact(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{1 - self.spared:.0%} in {self.of_largest:g}*max"


MOSTLY = MostOf(of_largest=2e-2, spared=0.01)
"""Outputs of a layer that computes in bf16, from its exact input."""
REPORTED = Tolerance(math.inf)
"""No limit: the error is for the reader."""
STORED = Tolerance(5e-5, 1e-4)
"""Every stored tensor: a float64 run of the oracle moves residual streams of size 29 by 4.4e-5."""
PLAIN = Tolerance(5e-5)
"""Logits, attention and FFN outputs: the oracle agrees with itself within 1e-5."""
EXACT = Tolerance()
"""Integers, and number formats: bit for bit."""
FREQUENCY = Tolerance(relative=1e-6)
"""fp32 inverse frequencies, down to 1e-7: two libraries' pow differ by a few units in the last place."""
PRODUCT = Tolerance(relative=1e-5)
"""Products with quantised weights, stored as float64 sums rounded once."""


@frozen(kw_only=True)
class Check:
    """One compared tensor. For an exact comparison the error counts the elements that differ."""

    subject: str
    """What was compared in: a prompt file, or another file of the folder."""
    name: str
    max_error: float
    """Largest |got - want|; inf for a NaN or a wrong shape."""
    share: float
    """Largest error as a share of the limit at its element; above 1 is over the limit."""
    tolerance: Tolerance
    folder: str = ""
    pool: str = ""
    """Empty where no pool takes part."""
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.share <= 1


@frozen(kw_only=True)
class Report:
    """All checks of a run, in the order they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if something was checked and nothing is over its limit."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)


def compare(subject: str, name: str, got: Tensor, want: Tensor, tolerance: Tolerance) -> Check:
    """Compare one tensor with its stored value, which is taken as it is."""
    error, share, note = _measure(got.detach().cpu(), want, tolerance)
    return Check(
        subject=subject, name=name, max_error=error, share=share, tolerance=tolerance, note=note
    )


def failed(subject: str, name: str, note: str) -> Check:
    """A tensor that could not be compared."""
    return Check(
        subject=subject, name=name, max_error=math.inf, share=math.inf, tolerance=EXACT, note=note
    )


def _measure(got: Tensor, want: Tensor, tolerance: Tolerance) -> tuple[float, float, str]:
    if got.shape != want.shape:
        return math.inf, math.inf, f"shape {list(got.shape)}, stored is {list(want.shape)}"
    if want.numel() == 0:
        return 0.0, 0.0, ""
    if tolerance.exact:
        return _count_differing(got, want)
    want64 = want.double()
    error = (got.double() - want64).abs().nan_to_num(nan=math.inf)
    if isinstance(tolerance, MostOf):
        counted = (
            error.flatten()
            .sort()
            .values[: max(1, math.ceil(error.numel() * (1 - tolerance.spared)))]
        )
        limit = tolerance.of_largest * want64.abs().max()
        return float(error.max()), float(counted[-1] / limit) if counted[-1] else 0.0, ""
    limit = tolerance.absolute + tolerance.relative * want64.abs()
    share = torch.where(error > 0, error / limit, 0.0)
    return float(error.max()), float(share.max()), ""


def _count_differing(got: Tensor, want: Tensor) -> tuple[float, float, str]:
    if got.dtype != want.dtype:
        return math.inf, math.inf, f"dtype {got.dtype}, stored is {want.dtype}"
    differ = _bytes(got).ne(_bytes(want)).any(-1).sum().item()
    return float(differ), math.inf if differ else 0.0, ""


def _bytes(tensor: Tensor) -> Tensor:
    """[elements, bytes]: -0.0 differs from 0.0, a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(tensor.numel(), -1)


def merged(reports: Sequence[Report]) -> Report:
    return Report(checks=tuple(check for report in reports for check in report.checks))
