"""Pictures of a benchmark: a roofline where there are products, else bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.bench.ceilings import Ceilings
from dsv4.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]


def figure_for(path: Path) -> Any:
    """An empty figure that can be saved there. Raises ConfigError: no matplotlib, or no picture format."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot: needs matplotlib; pip install 'dsv4[bench]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"--plot {path}: no picture format; end it in {', '.join(sorted(formats))}"
        )
    return figure


def plotter(path: Path) -> Callable[[Rows, Ceilings], None]:
    """Called before anything is measured, so that nothing is measured in vain; draws when it is given the rows."""
    figure = figure_for(path)

    def plot(rows: Rows, ceilings: Ceilings) -> None:
        axes = figure.subplots()
        if any(row["flop"] for row in rows):
            _roofline(axes, [row for row in rows if row["flop"]], ceilings)
        else:
            _bandwidth(axes, rows, ceilings)
        for case in dict.fromkeys(row["case"] for row in rows):
            axes.plot([], [], "o", color=_colour(rows, case), label=case)
        axes.set_title(f"{rows[0]['op']}: measured against the device's own limits")
        axes.legend(fontsize="small")
        figure.savefig(path, dpi=120)

    return plot


def _colour(rows: Rows, case: str) -> str:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return f"C{cases.index(case) % 10}"


def _roofline(axes: Any, rows: Rows, ceilings: Ceilings) -> None:
    intensity = [row["flop"] / row["nbytes"] for row in rows]
    peak = ceilings.matmul_tflops
    knee = peak * 1e3 / ceilings.copy_gbs
    edges = [min(*intensity, knee) / 2, knee, max(*intensity, knee) * 2]
    axes.loglog(edges, [min(peak, x * ceilings.copy_gbs / 1e3) for x in edges], "k-", label="limit")
    if ceilings.fp8_matmul_tflops:
        axes.axhline(ceilings.fp8_matmul_tflops, color="k", linestyle=":", label="fp8 products")
    for row, x in zip(rows, intensity, strict=True):
        tflops = row["flop"] / row["time_us"] / 1e6
        axes.loglog(x, tflops, "o", color=_colour(rows, row["case"]))
    axes.set(xlabel="FLOP per needed byte", ylabel="TFLOP/s")


def _bandwidth(axes: Any, rows: Rows, ceilings: Ceilings) -> None:
    axes.axhline(ceilings.copy_gbs, color="k", label="copy")
    for row in rows:
        gb_per_s = row["nbytes"] / row["time_us"] / 1e3
        axes.loglog(row["nbytes"], gb_per_s, "o", color=_colour(rows, row["case"]))
    axes.set(xlabel="needed bytes", ylabel="GB/s")
