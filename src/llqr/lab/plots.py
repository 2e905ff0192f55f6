"""Every drawing of the laboratory, by matplotlib in the style of `pictures`."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from llqr.lab import pictures
from llqr.lab.config.recipe import full_name
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.names import check_known
from llqr.lab.number_table import spread
from llqr.lab.results import measurements, tables
from llqr.lab.results.tables import PaperTable
from llqr.lab.runs.stored import settings_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Rows = Sequence[Row]

# -- tables ------------------------------------------------------------------------------------------------------------

WIDEST = 66
"""Characters on a line of a title."""


def save_table(table: PaperTable, path: Path) -> None:
    """Draw the rows with a measured number, or all rows of the paper if there is none."""
    if table.cells[["mean", "paper"]].isna().all(axis=None):
        raise ConfigurationError(f"--plot: no run counts in {table.name} yet, so there is nothing to draw.")
    title = f"{table.name}: {table.metric}"
    pictures.save(draw_table(table.of_rows(list(table.measured["row"]))), path, title, table_digest(table))


def table_digest(table: PaperTable) -> str:
    """A table by its name and numbers, to be named as the source of its picture."""
    return f"{table.name} sha256:{hashlib.sha256(repr(tables.texts(table)).encode()).hexdigest()[:16]}"


@pictures.styled
def draw_table(table: PaperTable) -> "Figure":
    """Measured numbers beside the printed ones: one panel per row of the table, one line per method."""
    shown = table.cells[table.cells["mean"].notna() | table.cells["paper"].notna()]
    beside = ", beside another experiment of the paper"
    rows = {fill(row + beside * (row in table.caveats), WIDEST): own for row, own in shown.groupby("row", sort=False)}
    heights = [0.36 * len(own) + 0.5 + 0.15 * title.count("\n") for title, own in rows.items()]
    figure, panels = pictures.column(heights)
    for axes, (title, own) in zip(panels, rows.items(), strict=True):
        _points(axes, own[["paper", "paper_std", "paper_n"]], 0.17, "paper", pictures.BLUE, "none")
        _points(axes, own[["mean", "std", "n"]], -0.17, "measured", pictures.ORANGE, pictures.ORANGE)
        axes.set_yticks(range(len(own)), [pictures.literal(method) for method in own["method"]])
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.margins(x=0.22)
        axes.grid(visible=False, axis="y")
        axes.set_title(pictures.literal(title))
    panels[-1].set_xlabel(pictures.literal(f"best {table.metric}"))
    pictures.legend_above(figure, panels[0])
    pictures.note_below(figure, "mean ± standard deviation over n seeds")
    return figure


def _points(axes: "Axes", numbers: "pd.DataFrame", shift: float, label: str, colour: str, face: str) -> None:
    """A point for every mean, with its standard deviation, and the mean and n beside it."""
    placed = numbers.set_axis(["mean", "std", "n"], axis=1).assign(y=[place + shift for place in range(len(numbers))])
    placed = placed[placed["mean"].notna()]
    if placed.empty:
        return
    means, stds = placed["mean"].astype(float), placed["std"].astype(float).fillna(0.0)
    look: dict[str, Any] = {"color": colour, "markersize": 5, "markerfacecolor": face, "label": label}
    axes.errorbar(means, placed["y"], xerr=stds, fmt="o", **look)
    for mean, std, n, y in zip(means, stds, placed["n"], placed["y"], strict=True):
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": colour}
        axes.annotate(f"{spread(mean)}, n = {n}", (mean + std, y), (6, 0), **beside)


# -- kept curves -------------------------------------------------------------------------------------------------------

CHANGE = "refresh_change"


def save_curves(files: Sequence[Path], path: Path, methods: Sequence[str] = (), panels: Sequence[str] = ()) -> None:
    """Draw the curves of these files, or only those of some methods."""
    lines = [line for file in files for line in measurements.read_curves(file)]
    known = list(dict.fromkeys(line["run"]["method"] for line in lines))
    wanted = [full_name(method, known) for method in methods]
    for method in wanted:
        check_known("--method", method, known)
    chosen = [line for line in lines if line["run"]["method"] in (wanted or known)]
    if not chosen:
        raise ConfigurationError("FILES hold no curve.")
    title = ", ".join([chosen[0]["recipe"], *named(chosen)])
    pictures.save(draw_curves(chosen, panels), path, title, ", ".join(map(pictures.digest, files)))


@pictures.styled
def draw_curves(lines: Rows, panels: Sequence[str] = ()) -> "Figure":
    """One panel per quantity, one line per run, one colour per method and setting.

    ``panels`` are columns by "epoch" or "step", such as "test_loss:step".
    """
    labels = _quantities(lines)
    if "accuracy" in lines[0]:
        lines = [{**line, "error": [100 - one for one in line["accuracy"]]} for line in lines]
    groups = named(lines)
    others = ("resumed", *measurements.REFRESH_COLUMNS)  # which do not have a number for every evaluation
    known = [CHANGE, *(name for name, own in lines[0].items() if isinstance(own, list) and name not in others)]
    shown = [panel.partition(":")[::2] for panel in panels or [f"{column}:epoch" for column in labels]]
    figure, places = pictures.column([1.9] * len(shown))
    for axes, (column, by) in zip(places, shown, strict=True):
        check_known("--panel", column, known)
        check_known("--panel: after the colon", by, ("epoch", "step"))
        for number, (name, runs) in enumerate(groups.items()):
            _runs(axes, column, by, name, number, [run for run in runs if column in run])
        label = column if column.startswith((lines[0]["split"], "train")) else f"{lines[0]['split']} {column}"
        axes.set_ylabel(pictures.literal(labels.get(column, label.replace("_", " "))))
        # Without the first steep quarter, beside which the differences at the end could not be seen.
        late = [value for line in lines if column != CHANGE for value in line.get(column, [])[len(line[column]) // 4 :]]
        if len(late) > 9 * len(lines) and (seen := [value for value in late if value is not None]):
            pictures.focus(axes, seen)
        axes.set_xlim(0, max(line[by][-1] for line in lines))
        if axes is places[-1] or len({by for _, by in shown}) > 1:
            axes.set_xlabel(by)
    pictures.legend_above(figure, places[0], columns=1)
    stopped = [
        f"{name}, seed {run['seed']}, stopped at epoch {run['epoch'][-1]:g}"
        for name, runs in groups.items()
        for run in runs
        if not run["finished"]
    ]
    pictures.note_below(figure, pictures.literal("\n".join(["one line per run", *stopped])))
    return figure


def named(lines: Rows) -> dict[str, list[Row]]:
    """The curves by what they are called: runs of one name differ in nothing but their seed."""
    found: dict[str, list[Row]] = {}
    for method, own in grouped(lines, lambda line: line["run"]["method"]).items():
        for line, setting in zip(own, settings_apart([line["run"] for line in own]), strict=True):
            found.setdefault(f"{method}, {setting}" if setting else method, []).append(line)
    return found


def _quantities(lines: Rows) -> dict[str, str]:
    """The columns to draw, and what their axes are called: what is evaluated beside the loss, or else that loss."""
    kinds = {(line["recipe"], line["split"], list(line)[list(line).index("step") + 1]) for line in lines}
    if len(kinds) > 1:
        found = " and ".join(sorted(map(" ".join, kinds)))
        raise ConfigurationError(f"FILES: the runs were evaluated by {found}; draw them apart.")
    _, split, evaluated = kinds.pop()
    label = f"{split} loss" if evaluated == f"{split}_loss" else f"{split} {evaluated}"
    change = {CHANGE: "|Ug - g| / |g|"} if any(CHANGE in line for line in lines) else {}
    return {evaluated: label, "train_loss": "training loss", **change}


def _runs(axes: "Axes", column: str, by: str, name: str, number: int, runs: Rows) -> None:
    colour, dashes = pictures.look(number)
    for place, run in enumerate(runs):
        x = np.array(run["refresh_step" if column == CHANGE else "step"], dtype=float)
        x = x if by == "step" else x * run["epoch"][-1] / run["step"][-1]
        y = np.array(run[column], dtype=float)  # null, for a number that is not finite, becomes NaN
        label = "_" if place else pictures.literal(fill(name, WIDEST))
        marker = "o" if len(x) < 10 else None
        axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.1, marker=marker, markersize=3, label=label)


# -- the figures of a report -------------------------------------------------------------------------------------------

Curves = Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]
"""By method: the positions on the x axis, and the values of every run there."""


@pictures.styled
def ranges(title: str, x: str, y: str, methods: Sequence[str], lines: Curves, *, late: bool = False) -> "Figure":
    """The mean over the runs of a method as a line, their range as a band; ``methods`` fixes the colours.

    With ``late``, the axis is logarithmic, or shows only what the curves reach after their first quarter.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 2.8), layout="constrained")
    axes = figure.subplots()
    drawn, after = [], []
    for method, (at, values) in lines.items():
        colour, dashes = pictures.look(methods.index(method))
        runs = np.array(values, dtype=float)
        if len(runs) > 1:
            axes.fill_between(at, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        marker = "o" if len(at) == 1 else None
        axes.plot(at, runs.mean(axis=0), color=colour, linestyle=dashes, linewidth=1.6, marker=marker)
        drawn += runs[np.isfinite(runs)].tolist()
        after += [value for run in runs for value in run[len(at) // 4 :] if np.isfinite(value)]
    if late and drawn and min(drawn) > 0 and max(drawn) > 20 * min(drawn):
        axes.set_yscale("log")
    elif late and after:
        pictures.focus(axes, after)
    axes.set(xlabel=pictures.literal(x), ylabel=pictures.literal(y), title=pictures.literal(title))
    return figure
