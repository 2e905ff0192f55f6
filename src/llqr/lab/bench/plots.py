"""Pictures of measurements: `llqr bench COMMAND --plot FILE`, and `llqr bench plot` for recorded ones.

Bars, or points with quartiles, where a row has one number; lines over the refresh interval, the size of a network,
ranks or products.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llqr.lab import pictures
from llqr.lab.bench import scaling as measured
from llqr.lab.bench.cadence import printed
from llqr.lab.bench.record import Row, Rows, measured_on
from llqr.lab.bench.workload import Network
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.22
"""Inches per bar."""
GIB, MIB = 2**30, 2**20
MODEL = itemgetter("model")
COLOURS = {"LLQR+SAM": pictures.ORANGE, "LLQR": pictures.BLUE}
LABELLED = 500
"""The interval whose numbers are written beside the points: that of the paper's CIFAR runs."""
PAPER = ("LLQR+SAM", LABELLED)
"""The row of the paper's cadence table that its refreshes are taken from."""


@pictures.styled
def memory(rows: Rows) -> "Figure":
    """One panel per network; the part of the factors of U is darker."""
    figure, panels = _panels(rows, "model")
    for axes, own in panels:
        names = [row["what"] if row["structure"] is None else f"{row['what']}, {row['structure']}" for row in own]
        _bars(axes, names, [row["peak_bytes"] / GIB for row in own], "{:.2f}", pictures.SKY, label="all")
        factors = [row["metric_bytes"] / GIB for row in own]
        axes.barh(range(len(own)), factors, color=pictures.BLUE, height=0.7, label="factors of U")
    axes.set_xlabel("GiB at the peak")
    pictures.legend_above(figure, panels[0][0])
    return figure


@pictures.styled
def refresh(rows: Rows) -> "Figure":
    """Seconds of a refresh, and where they were measured the errors of what it learned."""
    drawn = [row for row in rows if "seconds" in row]
    if not drawn:
        raise ConfigurationError("--plot: every refresh was refused, so there is nothing to draw.")
    keys = ("structure", "engine") if len({row["model"] for row in drawn}) == 1 else ("model", "structure", "engine")
    with_errors = [row for row in drawn if (row.get("errors") or {}).get("Ug") is not None]
    figure, panels = pictures.column([_height(own) for own in (drawn, with_errors) if own])
    seconds = [row["seconds"]["median"] for row in drawn]
    _bars(panels[0], [_way(row, keys) for row in drawn], seconds, "{:.2f}", pictures.ORANGE)
    panels[0].set(title="seconds of a refresh")
    if with_errors:
        errors = [100 * row["errors"]["Ug"] for row in with_errors]
        _bars(panels[1], [_way(row, keys) for row in with_errors], errors, "{:.2g} %", pictures.BLUE)
        panels[1].set(title="error of what it learned, |Ug − U'g| / |U'g − g|, in %")
    return figure


@pictures.styled
def step(rows: Rows) -> "Figure":
    """One panel for every network and form of the passes."""
    figure, panels = _panels(rows, "model", "passes")
    for axes, own in panels:
        ratios = [row["vs_sgd"]["median"] for row in own]
        _bars(axes, [row["method"] for row in own], ratios, "{:.2f}", pictures.ORANGE)
    axes.set_xlabel("time of a step / time of a step of SGD")
    return figure


@pictures.styled
def peers(rows: Rows) -> "Figure":
    """Medians with quartiles; left of 1 ours is faster."""
    figure, panels = _panels(rows, "model")
    kinds = {"step": (pictures.ORANGE, "o", "whole step"), "alone": (pictures.BLUE, "s", "optimizer alone")}
    for axes, own in panels:
        for what, (colour, marker, label) in kinds.items():
            places = [number for number, row in enumerate(own) if row["what"] == what]
            ratios = [own[number]["ratio"] for number in places]
            medians = [ratio["median"] for ratio in ratios]
            spread = [[r["median"] - r["low"] for r in ratios], [r["high"] - r["median"] for r in ratios]]
            axes.errorbar(medians, places, xerr=spread, fmt=marker, color=colour, markersize=4, label=label)
        axes.axvline(1, color=pictures.INK, linewidth=1, linestyle=(0, (1.5, 1.5)))
        _names(axes, [f"{row['method']}, {row['theirs']}" for row in own])
    axes.set_xlabel("our time / time of pytorch_optimizer; control: theirs / theirs")
    pictures.legend_above(figure, panels[0][0])
    return figure


@pictures.styled
def cadence(rows: Rows) -> "Figure":
    """One panel per network; the paper's ratios are dashed."""
    figure, panels = _panels(rows, "model", height=2.5)
    for axes, own in panels:
        for method, colour in COLOURS.items():
            learned = [row for row in own if row["method"] == method]
            _line(axes, learned, f"{method}, here", colour, theirs=False)
            _line(axes, [row for row in learned if row["paper"]], f"{method}, paper", colour, theirs=True)
        axes.axhline(1, color=pictures.INK, linewidth=1, linestyle=(0, (1.5, 1.5)), label="SAM")
        axes.set(xscale="log", yscale="log", ylabel="epoch / epoch of SAM")
        axes.margins(y=0.12)
        pictures.written_out(axes.xaxis, sorted({row["interval"] for row in own if row["interval"] is not None}))
        _write_out_height(axes, (0.5, 0.7, 1, 1.5, 2, 3, 5, 10))
    axes.set_xlabel("steps between refreshes")
    pictures.legend_above(figure, panels[0][0], columns=3)
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
    figure, panels = _panels(drawn, "model", "structure", height=1.7)
    for axes, own in panels:
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
        axes.set(ylabel="J")
    axes.set_xlabel("products with H")
    fullest = max((axes for axes, _ in panels), key=lambda axes: len(axes.get_lines()))
    pictures.legend_above(figure, fullest)
    return figure


def _panels(rows: Rows, *keys: str, height: float | None = None) -> "tuple[Figure, list[tuple[Axes, list[Row]]]]":
    """A panel, with a title, for the rows that have the same words under these keys; by default as high as its bars."""
    groups = grouped(rows, lambda row: ", ".join(row[key] for key in keys))
    figure, panels = pictures.column([height or _height(own) for own in groups.values()])
    for axes, title in zip(panels, groups, strict=True):
        axes.set(title=title)
    return figure, list(zip(panels, groups.values(), strict=True))


def _way(row: Row, keys: Sequence[str]) -> str:
    """What distinguishes one refresh from another; older files do not know how often it makes a product."""
    every = row.get("product_every")
    return "\n".join([", ".join(row[key] for key in keys), *([f"a product every {every}"] if every else [])])


def _height(rows: Rows) -> float:
    lines = 1 + any(row.get("product_every") for row in rows)
    return lines * ROW * len(rows) + 0.5


def _names(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _bars(
    axes: "Axes", names: Sequence[str], lengths: Sequence[float], form: str, colour: str, label: str = ""
) -> None:
    """Bars with numbers at their ends, and room for them."""
    bars = axes.barh(range(len(lengths)), lengths, color=colour, height=0.7, label=label)
    axes.bar_label(bars, [form.format(length) for length in lengths], padding=3, fontsize=8)
    axes.set_xlim(0, 1.15 * max(lengths) or 1)  # all are zero where an engine is compared with itself
    _names(axes, names)


def _write_out_height(axes: "Axes", ticks: Sequence[float]) -> None:
    """Those of the numbers that lie in the range of a logarithmic axis."""
    low, high = axes.get_ylim()
    pictures.written_out(axes.yaxis, [tick for tick in ticks if low <= tick <= high])


DRAWINGS: "dict[str, tuple[Callable[[Rows], Figure], str]]" = {
    "cadence": (cadence, "Epoch time relative to SAM, by refresh interval"),
    "memory": (memory, "Most memory that a step and a refresh hold"),
    "peers": (peers, "Our steps compared with those of pytorch_optimizer"),
    "refresh": (refresh, "Time of a refresh, and error of what it learns"),
    "scaling": (scaling, "Time of a refresh by the number of parameters"),
    "shards": (shards, "Memory and traffic of a metric that ranks share"),
    "solvers": (solvers, "Objective of a refresh by the number of products with H"),
    "step": (step, "Time of a step relative to SGD"),
}
"""By bench: what draws it, and its title."""


def save(record: Mapping[str, Any], path: Path, source: str = "") -> None:
    """Draw the rows of a record, in the form it has on disk, with the machine they were measured on."""
    draw, title = DRAWINGS[record["bench"]]
    figure = draw(record["rows"])
    pictures.note_below(figure, measured_on(record))
    pictures.save(figure, path, title, source)


def save_recorded(file: Path, path: Path) -> None:
    """Draw a measurement that a command recorded with ``--out``."""
    try:
        record = json.loads(file.read_text())
        complete, bench = record["complete"], record["bench"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{file} is no file that `llqr bench --out` wrote.") from error
    if not complete or bench not in DRAWINGS:
        raise ConfigurationError(f"{file}: {'nothing draws ' + bench if complete else 'the command was interrupted'}.")
    save(record, path, pictures.digest(file))
