"""The paper's cadence figure with ours beside it: what an epoch costs by the interval between refreshes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llqr.lab import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"LLQR+SAM": pictures.ORANGE, "LLQR": pictures.BLUE}
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
LABELLED = 500
"""The interval whose numbers are written beside the points: that of the paper's CIFAR runs."""


@pictures.styled
def cadence(rows: Sequence[dict[str, Any]]) -> "Figure":
    """One panel per network; the paper's ratios are dashed."""
    networks = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pictures.column([2.5] * len(networks))
    for axes, network in zip(panels, networks, strict=True):
        own = [row for row in rows if row["model"] == network]
        for method, colour in COLOURS.items():
            learned = [row for row in own if row["method"] == method]
            _line(axes, learned, f"{method}, here", colour, theirs=False)
            _line(axes, [row for row in learned if row["paper"]], f"{method}, paper", colour, theirs=True)
        axes.axhline(1, color=pictures.INK, linewidth=1, linestyle=(0, (1.5, 1.5)), label="SAM")
        axes.set(xscale="log", yscale="log", title=network, ylabel="epoch / epoch of SAM")
        axes.margins(y=0.12)
        pictures.written_out(axes.xaxis, sorted({row["interval"] for row in own if row["interval"] is not None}))
        low, high = axes.get_ylim()
        pictures.written_out(axes.yaxis, [tick for tick in TICKS if low <= tick <= high])
    panels[-1].set_xlabel("steps between refreshes")
    pictures.legend_above(figure, panels[0], columns=3)
    return figure


def _line(axes: "Axes", rows: Sequence[dict[str, Any]], label: str, colour: str, *, theirs: bool) -> None:
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
