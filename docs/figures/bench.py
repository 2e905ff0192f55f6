"""Records of `llqr bench` as the pictures of the site: `python docs/figures/bench.py results/bench/peers.json ...`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llqr.lab import pictures
from llqr.lab.grouping import grouped
from llqr.lab.results.tables import paper

Row = Mapping[str, Any]
Rows = Sequence[Row]
BAR = 0.22
"""Inches."""
LABELLED = 500
"""The refresh interval whose numbers are written beside the points: that of the paper's CIFAR runs."""


@pictures.styled
def cadence(rows: Rows) -> Figure:
    """Epoch time by refresh interval, one panel per network; the paper's ratios are dashed."""
    figure, panels = _panels(rows, height=2.5)
    for axes, own in panels:
        for method, colour in (("LLQR+SAM", pictures.ORANGE), ("LLQR", pictures.BLUE)):
            learned = [row for row in own if row["method"] == method]
            printed = [row for row in learned if row["paper"]]
            ours, theirs = [row["vs_sam"]["median"] for row in learned], [row["paper"]["vs_sam"] for row in printed]
            _line(axes, learned, ours, f"{method}, here", -11, color=colour)
            dashed = {"linestyle": (0, (4, 2)), "markerfacecolor": "none"}
            _line(axes, printed, theirs, f"{method}, paper", 5, color=colour, **dashed)
        axes.axhline(1, color=pictures.INK, linewidth=1, linestyle=(0, (1.5, 1.5)), label="SAM")
        axes.set(xscale="log", yscale="log", ylabel="epoch / epoch of SAM")
        axes.margins(y=0.12)
        pictures.written_out(axes.xaxis, sorted({row["interval"] for row in own if row["interval"] is not None}))
        _label_height(axes, (0.5, 0.7, 1, 1.5, 2, 3, 5, 10))
    axes.set_xlabel("steps between refreshes")
    pictures.legend_above(figure, panels[0][0], columns=3)
    return figure


def _line(axes: Axes, rows: Rows, ratios: Sequence[float], label: str, below: float, **look: Any) -> None:
    if not rows:
        return
    axes.plot([row["interval"] for row in rows], ratios, marker="o", markersize=4, label=label, **look)
    for row, ratio in zip(rows, ratios, strict=True):
        if row["interval"] == LABELLED:
            place = {"xytext": (4, below), "textcoords": "offset points", "color": look["color"], "fontsize": 8}
            axes.annotate(f"{ratio:.2f}", (LABELLED, ratio), **place)


@pictures.styled
def peers(rows: Rows) -> Figure:
    """Medians with quartiles; left of 1 ours is faster."""
    figure, panels = _panels(rows)
    kinds = {"step": (pictures.ORANGE, "o", "whole step"), "alone": (pictures.BLUE, "s", "optimizer alone")}
    for axes, own in panels:
        for what, (colour, marker, label) in kinds.items():
            places = [number for number, row in enumerate(own) if row["what"] == what]
            low, median, high = np.array([[own[i]["ratio"][key] for i in places] for key in ("low", "median", "high")])
            spread = [median - low, high - median]
            axes.errorbar(median, places, xerr=spread, fmt=marker, color=colour, markersize=4, label=label)
        axes.axvline(1, color=pictures.INK, linewidth=1, linestyle=(0, (1.5, 1.5)))
        _names(axes, [f"{row['method']}, {row['theirs']}" for row in own])
    axes.set_xlabel("our time / time of pytorch_optimizer; control: theirs / theirs")
    pictures.legend_above(figure, panels[0][0])
    return figure


@pictures.styled
def refresh(rows: Rows) -> Figure:
    """Seconds of a refresh, and where they were measured the errors of what it learned."""
    drawn = [row for row in rows if "seconds" in row]
    keys = ("structure", "engine") if len({row["model"] for row in drawn}) == 1 else ("model", "structure", "engine")
    with_errors = [row for row in drawn if (row.get("errors") or {}).get("Ug") is not None]

    def names(own: Rows) -> list[str]:  # older files do not say how often a refresh makes a product
        every = [f"\na product every {row['product_every']}" if "product_every" in row else "" for row in own]
        return [", ".join(row[key] for key in keys) + text for row, text in zip(own, every, strict=True)]

    figure, panels = pictures.column([2 * BAR * len(own) + 0.5 for own in (drawn, with_errors) if own])
    _bars(panels[0], names(drawn), [row["seconds"]["median"] for row in drawn], "{:.2f}", pictures.ORANGE)
    panels[0].set(title="seconds of a refresh")
    if with_errors:
        errors = [100 * row["errors"]["Ug"] for row in with_errors]
        _bars(panels[1], names(with_errors), errors, "{:.2g} %", pictures.BLUE)
        panels[1].set(title="error of what it learned, |Ug − U'g| / |U'g − g|, in %")
    return figure


@pictures.styled
def scaling(rows: Rows) -> Figure:
    """Logarithmic in both directions: a power of the number of parameters is a straight line."""
    figure, (axes,) = pictures.column([3.0])
    sizes, seconds = np.array([[row["parameters"], row["seconds"]["median"]] for row in rows]).T
    axes.plot(sizes, seconds, "o", color=pictures.ORANGE, label="here, LLQR and LLQR+SAM alike")
    for row, size, time in zip(rows, sizes, seconds, strict=True):
        axes.annotate(f"{row['model']} {time:.2f} s", (size, time), (7, -9), textcoords="offset points", fontsize=8)
    if len(sizes) > 1:
        power, level = np.polyfit(np.log(sizes), np.log(seconds), 1)
        label = f"here, fit: P^{power:.2f}"
        axes.plot(sizes, np.exp(level) * sizes**power, color=pictures.ORANGE, linewidth=1, label=label)
    for method, mark, place in (("LLQR", "^", (5, -12)), ("LLQR+SAM", "s", (-5, 6))):
        table = {row["arch"].lower().partition("/")[0]: row["steady_update_s"] for row in paper()["cadence"]["rows"]
                 if (row["method"], row["interval"]) == (method, LABELLED)}  # fmt: skip
        theirs = [(row["parameters"], table[row["model"]]) for row in rows if row["model"] in table]
        if theirs:
            look: dict[str, Any] = {"color": pictures.BLUE, "markerfacecolor": "none", "label": f"paper, {method}"}
            axes.plot(*zip(*theirs, strict=True), mark, **look)
        for at in theirs:
            side = "left" if place[0] > 0 else "right"
            axes.annotate(f"{at[1]:.1f} s", at, place, textcoords="offset points", fontsize=8, ha=side)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="seconds of a refresh")
    axes.margins(x=0.2, y=0.12)
    _label_height(axes, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200))
    pictures.legend_above(figure, axes)
    return figure


def _panels(rows: Rows, height: float | None = None) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """A panel per network, by default as high as its bars."""
    groups = grouped(rows, lambda row: row["model"])
    figure, panels = pictures.column([height or BAR * len(own) + 0.5 for own in groups.values()])
    for axes, title in zip(panels, groups, strict=True):
        axes.set(title=title)
    return figure, list(zip(panels, groups.values(), strict=True))


def _names(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _bars(axes: Axes, names: Sequence[str], lengths: Sequence[float], form: str, colour: str) -> None:
    """Bars with numbers at their ends, and room for them."""
    bars = axes.barh(range(len(lengths)), lengths, color=colour, height=0.7)
    axes.bar_label(bars, [form.format(length) for length in lengths], padding=3, fontsize=8)
    axes.set_xlim(0, 1.15 * max(lengths) or 1)  # all are zero where an engine is compared with itself
    _names(axes, names)


def _label_height(axes: Axes, ticks: Sequence[float]) -> None:
    """Label a logarithmic axis with those of the numbers that lie in its range."""
    low, high = axes.get_ylim()
    pictures.written_out(axes.yaxis, [tick for tick in ticks if low <= tick <= high])


BENCHES: dict[str, tuple[Callable[[Rows], Figure], str]] = {
    "cadence": (cadence, "Epoch time relative to SAM, by refresh interval"),
    "peers": (peers, "Our steps compared with those of pytorch_optimizer"),
    "refresh": (refresh, "Time of a refresh, and error of what it learns"),
    "scaling": (scaling, "Time of a refresh by the number of parameters"),
}
"""By command of `llqr bench`: what draws it, and its title. Memory and host are only printed."""


def save(found: Row, path: Path, source: str) -> None:
    """Draw the rows of a record, in the form it has on disk, with the machine they were measured on."""
    draw, title = BENCHES[found["bench"]]
    figure, machine = draw(found["rows"]), found["machine"]
    device = machine.get("gpu") or f"{machine['cpus']} CPU cores"
    pictures.note_below(figure, f"{device}, torch {found['versions']['torch']}")
    pictures.save(figure, path, title, source)


def read(file: Path) -> Row:
    """A measurement that a command recorded completely with ``--out``."""
    found: Row = json.loads(file.read_text())
    if not found["complete"]:
        raise SystemExit(f"{file}: the command was interrupted.")
    return found


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        save(read(file), Path(__file__).with_suffix("") / f"{file.stem}.svg", pictures.digest(file))
