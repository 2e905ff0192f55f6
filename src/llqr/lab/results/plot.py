"""A table of the paper as a picture: measured numbers beside the printed ones, with their standard deviations."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from llqr.lab import pictures
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.results.paper_table import Number, PaperCell, PaperTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.36
"""Inches per method."""
LINE, WIDEST = 0.15, 66
"""Inches per further line of a title, and the characters on one."""


def digest(table: PaperTable) -> str:
    """A table by its name and numbers, to be named as the source of its picture."""
    numbers = json.dumps([cell.to_dict() for cell in table.cells])
    return f"{table.name} sha256:{hashlib.sha256(numbers.encode()).hexdigest()[:16]}"


def save(table: PaperTable, path: Path) -> None:
    """Draw the rows with a measured number, or all rows of the paper if there is none."""
    means = [number.mean for cell in table.cells for number in (cell.measured, cell.paper) if number is not None]
    if not means:
        raise ConfigurationError(f"--plot: no run counts in {table.name} yet, so there is nothing to draw.")
    if any(isinstance(mean, int) for mean in means):
        raise ConfigurationError(f"--plot: {table.name} compares no methods, so there is nothing to draw.")
    measured = dict.fromkeys(cell.row for cell in table.measured)
    title = f"{table.name}: {table.metric}"
    pictures.save(draw(table.of_rows(list(measured))), path, title, digest(table))


@pictures.styled
def draw(table: PaperTable) -> "Figure":
    """One panel per row of the table, one line per method."""
    shown = [cell for cell in table.cells if cell.measured or cell.paper or cell.beside]
    rows = {_title(row, cells): cells for row, cells in grouped(shown, lambda cell: cell.row).items()}
    figure, panels = pictures.column(
        [ROW * len(cells) + 0.5 + LINE * title.count("\n") for title, cells in rows.items()]
    )
    for axes, (title, cells) in zip(panels, rows.items(), strict=True):
        _points(axes, [cell.paper or cell.beside for cell in cells], 0.17, "paper", pictures.BLUE, hollow=True)
        _points(axes, [cell.measured for cell in cells], -0.17, "measured", pictures.ORANGE, hollow=False)
        axes.set_yticks(range(len(cells)), [pictures.literal(cell.column) for cell in cells])
        axes.set_ylim(len(cells) - 0.4, -0.6)
        axes.margins(x=0.22)
        axes.grid(visible=False, axis="y")
        axes.set_title(pictures.literal(title))
    panels[-1].set_xlabel(pictures.literal(table.metric))
    pictures.legend_above(figure, panels[0])
    pictures.note_below(figure, "mean ± standard deviation over n seeds")
    return figure


def _title(row: str, cells: Sequence[PaperCell]) -> str:
    """Rows of one's own experiments are named after all settings in which they differ."""
    return fill(f"{row}, beside another experiment of the paper" if cells[0].beside else row, WIDEST)


def _points(
    axes: "Axes", numbers: Sequence[Number | None], shift: float, label: str, colour: str, *, hollow: bool
) -> None:
    """A point for every number, with n beside it."""
    placed = [(place + shift, number) for place, number in enumerate(numbers) if number is not None]
    if not placed:
        return
    axes.errorbar(
        [number.mean for _, number in placed],
        [height for height, _ in placed],
        xerr=[number.std or 0 for _, number in placed],
        fmt="o",
        color=colour,
        markersize=5,
        markerfacecolor="none" if hollow else colour,
        label=label,
    )
    for height, number in placed:
        right = number.mean + (number.std or 0)
        text = f"{number.mean:.2f}, n = {number.n}" if number.n else f"{number.mean:.2f}"
        axes.annotate(text, (right, height), (6, 0), textcoords="offset points", va="center", fontsize=8, color=colour)
