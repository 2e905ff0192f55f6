"""How fast the inner solvers lower the objective of a refresh."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llqr.lab import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pictures.styled
def solvers(rows: Sequence[dict[str, Any]]) -> "Figure":
    """One panel for every network and structure; solvers that refused a structure are not in its panel."""
    drawn = [row for row in rows if "objective" in row]
    looks = {name: number for number, name in enumerate(dict.fromkeys(row["solver"] for row in drawn))}
    places = list(dict.fromkeys((row["model"], row["structure"]) for row in drawn))
    figure, panels = pictures.column([1.7] * len(places))
    for axes, place in zip(panels, places, strict=True):
        for row in (row for row in drawn if (row["model"], row["structure"]) == place):
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
        axes.set(title=f"{place[0]}, {place[1]}", ylabel="J")
    panels[-1].set_xlabel("products with H")
    fullest = max(panels, key=lambda axes: len(axes.get_lines()))
    pictures.legend_above(figure, fullest)
    return figure
