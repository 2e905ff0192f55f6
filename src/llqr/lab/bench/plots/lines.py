"""Measurements over a number, as lines: over the refresh interval, the size of a network, ranks, or products."""

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from llqr.lab import pictures
from llqr.lab.bench import scaling as measured
from llqr.lab.bench.cadence import printed
from llqr.lab.bench.record import Rows
from llqr.lab.bench.workload import Network
from llqr.lab.grouping import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"LLQR+SAM": pictures.ORANGE, "LLQR": pictures.BLUE}
LABELLED = 500
"""The interval whose numbers are written beside the points: that of the paper's CIFAR runs."""
PAPER = ("LLQR+SAM", LABELLED)
"""The row of the paper's cadence table that its refreshes are taken from."""
MIB = 2**20
MODEL = itemgetter("model")


@pictures.styled
def cadence(rows: Rows) -> "Figure":
    """One panel per network; the paper's ratios are dashed."""
    networks = grouped(rows, MODEL)
    figure, panels = pictures.column([2.5] * len(networks))
    for axes, (network, own) in zip(panels, networks.items(), strict=True):
        for method, colour in COLOURS.items():
            learned = [row for row in own if row["method"] == method]
            _line(axes, learned, f"{method}, here", colour, theirs=False)
            _line(axes, [row for row in learned if row["paper"]], f"{method}, paper", colour, theirs=True)
        axes.axhline(1, color=pictures.INK, linewidth=1, linestyle=(0, (1.5, 1.5)), label="SAM")
        axes.set(xscale="log", yscale="log", title=network, ylabel="epoch / epoch of SAM")
        axes.margins(y=0.12)
        pictures.written_out(axes.xaxis, sorted({row["interval"] for row in own if row["interval"] is not None}))
        _write_out_height(axes, (0.5, 0.7, 1, 1.5, 2, 3, 5, 10))
    panels[-1].set_xlabel("steps between refreshes")
    pictures.legend_above(figure, panels[0], columns=3)
    return figure


def _line(axes: "Axes", rows: Rows, label: str, colour: str, *, theirs: bool) -> None:
    if not rows:
        return
    ratios = [row["paper"]["vs_sam"] if theirs else row["vs_sam"]["median"] for row in rows]
    look: dict[str, Any] = {"linestyle": (0, (4, 2)), "markerfacecolor": "none"} if theirs else {}
    axes.plot([row["interval"] for row in rows], ratios, color=colour, marker="o", markersize=4, label=label, **look)
    for row, ratio in zip(rows, ratios, strict=True):
        if row["interval"] == LABELLED:
            beside = (4, 5 if theirs else -11)
            axes.annotate(
                f"{ratio:.2f}", (LABELLED, ratio), beside, textcoords="offset points", color=colour, fontsize=8
            )


@pictures.styled
def scaling(rows: Rows) -> "Figure":
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
    _write_out_height(axes, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200))
    pictures.legend_above(figure, axes)
    return figure


@pictures.styled
def shards(rows: Rows) -> "Figure":
    """Memory of the planned networks beside the paper's storage table; below it traffic, where it was counted."""
    counted = [row for row in rows if row.get("step_payload") is not None and row["what"] == "one rank"]
    figure, panels = pictures.column([2.6, 2.0] if counted else [2.6])
    planned = [row for row in rows if row["what"] == "planned"]
    for colour, (network, own) in zip(pictures.COLOURS, grouped(planned, MODEL).items(), strict=False):
        sizes = [row["metric_bytes"] / MIB for row in own]
        panels[0].plot([row["shards"] for row in own], sizes, "o-", color=colour, markersize=4, label=network)
    theirs = [row for row in planned if row["paper_mib"] is not None]
    places, printed = [row["shards"] for row in theirs], [row["paper_mib"] for row in theirs]
    panels[0].plot(places, printed, "s", color=pictures.INK, markerfacecolor="none", markersize=8, label="paper")
    panels[0].set(title="metric on the fullest rank", ylabel="MiB", yscale="log")
    for colour, (network, own) in zip(pictures.COLOURS, grouped(counted, MODEL).items(), strict=False):
        for key, look, label in (("step_payload", "o-", network.partition(":")[0]), ("step_formula", "--", None)):
            received = [row[key] / MIB for row in own]
            panels[1].plot([row["shards"] for row in own], received, look, color=colour, markersize=4, label=label)
        panels[1].set(title="received by a rank in a step; dashed: without padding", ylabel="MiB")
        panels[1].legend(loc="upper left")
    for axes in panels:
        axes.set_xscale("log")
        pictures.written_out(axes.xaxis, sorted({row["shards"] for row in rows}))
    _write_out_height(panels[0], (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000))
    panels[-1].set_xlabel("ranks that share the metric")
    pictures.legend_above(figure, panels[0], columns=3)
    return figure


@pictures.styled
def solvers(rows: Rows) -> "Figure":
    """One panel for every network and structure; solvers that refused a structure are not in its panel."""
    drawn = [row for row in rows if "objective" in row]
    looks = {name: number for number, name in enumerate(dict.fromkeys(row["solver"] for row in drawn))}
    places = grouped(drawn, lambda row: f"{row['model']}, {row['structure']}")
    figure, panels = pictures.column([1.7] * len(places))
    for axes, (place, own) in zip(panels, places.items(), strict=True):
        for row in own:
            number = looks[row["solver"]]
            axes.plot(
                [int(count) for count in row["objective"]],
                list(row["objective"].values()),
                color=pictures.COLOURS[number],
                linestyle=pictures.DASHES[number % len(pictures.DASHES)],
                linewidth=1.5,
                label=row["solver"],
            )
        # J falls by four decades and can end below 0.
        axes.set_yscale("symlog", linthresh=1)
        axes.set(title=place, ylabel="J")
    panels[-1].set_xlabel("products with H")
    fullest = max(panels, key=lambda axes: len(axes.get_lines()))
    pictures.legend_above(figure, fullest)
    return figure


def _write_out_height(axes: "Axes", ticks: Sequence[float]) -> None:
    """Those of the numbers that lie in the range of a logarithmic axis."""
    low, high = axes.get_ylim()
    pictures.written_out(axes.yaxis, [tick for tick in ticks if low <= tick <= high])
