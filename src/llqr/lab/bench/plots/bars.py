"""Measurements with one number per row, as bars or as points with quartiles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llqr.lab import pictures
from llqr.lab.bench.record import Row, Rows
from llqr.lab.grouping import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.22
"""Inches per bar."""
GIB = 2**30


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
    with_errors = [row for row in drawn if (row.get("errors") or {}).get("Ug") is not None]
    figure, panels = pictures.column([_height(own) for own in (drawn, with_errors) if own])
    seconds = [row["seconds"]["median"] for row in drawn]
    _bars(panels[0], list(map(_way, drawn)), seconds, "{:.2f}", pictures.ORANGE)
    panels[0].set(title="seconds of a refresh")
    if with_errors:
        errors = [100 * row["errors"]["Ug"] for row in with_errors]
        _bars(panels[1], list(map(_way, with_errors)), errors, "{:.2g} %", pictures.BLUE)
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


def _panels(rows: Rows, *keys: str) -> "tuple[Figure, list[tuple[Axes, list[Row]]]]":
    """A panel, with a title, for the rows that have the same words under these keys."""
    groups = grouped(rows, lambda row: ", ".join(row[key] for key in keys))
    figure, panels = pictures.column([_height(own) for own in groups.values()])
    for axes, title in zip(panels, groups, strict=True):
        axes.set(title=title)
    return figure, list(zip(panels, groups.values(), strict=True))


def _way(row: Row) -> str:
    """What distinguishes one refresh from another; older files do not know how often it makes a product."""
    every = row.get("product_every")
    return "\n".join([f"{row['structure']}, {row['engine']}", *([f"a product every {every}"] if every else [])])


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
