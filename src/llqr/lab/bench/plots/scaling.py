"""The time of a refresh by the size of the network, with the paper's two networks and its exponent beside it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llqr.lab import pictures
from llqr.lab.bench import scaling as measured
from llqr.lab.bench.cadence import printed
from llqr.lab.bench.workload import Network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = ("LLQR+SAM", 500)
"""The row of the paper's cadence table that its refreshes are taken from."""
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


@pictures.styled
def scaling(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Logarithmic in both directions: a power of the number of parameters is a straight line."""
    figure, (axes,) = pictures.column([3.0])
    sizes, seconds = [row["parameters"] for row in rows], [row["seconds"]["median"] for row in rows]
    axes.plot(sizes, seconds, "o", color=pictures.ORANGE, label="here")
    for row, size, time in zip(rows, sizes, seconds, strict=True):
        axes.annotate(f"{row['model']} {time:.2f} s", (size, time), (7, -9), textcoords="offset points", fontsize=8)
    found = measured.conclusion(rows)
    if found:
        power = found["exponent"]["median"]
        level = np.exp(np.mean(np.log(seconds)) - power * np.mean(np.log(sizes)))
        ends = np.array([min(sizes), max(sizes)])
        axes.plot(ends, level * ends**power, color=pictures.ORANGE, linewidth=1, label=f"here, fit: P^{power:.2f}")
    papers = [printed(Network.parse(row["model"]), *PAPER) for row in rows]
    theirs = [(size, row["refresh_seconds"]) for size, row in zip(sizes, papers, strict=True) if row]
    if theirs:
        at, spent = zip(*theirs, strict=True)
        axes.plot(at, spent, "s", color=pictures.BLUE, markerfacecolor="none", label="paper, cadence table")
        for size, time in theirs:
            axes.annotate(f"{time:.1f} s", (size, time), (-4, 7), textcoords="offset points", fontsize=8, ha="right")
        if found:
            power = float(np.mean(found["paper_exponent"]))
            line = spent[-1] * (np.array([min(sizes), at[-1]]) / at[-1]) ** power
            label = f"slope of the paper's fit, P^{power:.2f}"
            axes.plot([min(sizes), at[-1]], line, color=pictures.BLUE, linewidth=1, linestyle=(0, (4, 2)), label=label)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="seconds of a refresh")
    axes.margins(x=0.2, y=0.12)
    low, high = axes.get_ylim()
    pictures.written_out(axes.yaxis, [tick for tick in TICKS if low <= tick <= high])
    pictures.legend_above(figure, axes)
    return figure
