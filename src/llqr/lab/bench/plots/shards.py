"""What each rank holds of a metric that is shared out, and what it receives in a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llqr.lab import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@pictures.styled
def shards(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Memory of the planned networks beside the paper's storage table; below it traffic, where it was counted."""
    counted = [row for row in rows if row.get("step_payload") is not None and row["what"] == "one rank"]
    figure, panels = pictures.column([2.6, 2.0] if counted else [2.6])
    planned = [row for row in rows if row["what"] == "planned"]
    for colour, network in zip(pictures.COLOURS, dict.fromkeys(row["model"] for row in planned), strict=False):
        own = [row for row in planned if row["model"] == network]
        sizes = [row["metric_bytes"] / MIB for row in own]
        panels[0].plot([row["shards"] for row in own], sizes, "o-", color=colour, markersize=4, label=network)
    theirs = [row for row in planned if row["paper_mib"] is not None]
    places, printed = [row["shards"] for row in theirs], [row["paper_mib"] for row in theirs]
    panels[0].plot(places, printed, "s", color=pictures.INK, markerfacecolor="none", markersize=8, label="paper")
    panels[0].set(title="metric on the fullest rank", ylabel="MiB", yscale="log")
    for colour, network in zip(pictures.COLOURS, dict.fromkeys(row["model"] for row in counted), strict=False):
        own = [row for row in counted if row["model"] == network]
        for key, look, label in (("step_payload", "o-", network.partition(":")[0]), ("step_formula", "--", None)):
            received = [row[key] / MIB for row in own]
            panels[1].plot([row["shards"] for row in own], received, look, color=colour, markersize=4, label=label)
        panels[1].set(title="received by a rank in a step; dashed: without padding", ylabel="MiB")
        panels[1].legend(loc="upper left")
    for axes in panels:
        axes.set_xscale("log")
        pictures.written_out(axes.xaxis, sorted({row["shards"] for row in rows}))
    low, high = panels[0].get_ylim()
    pictures.written_out(panels[0].yaxis, [tick for tick in TICKS if low <= tick <= high])
    panels[-1].set_xlabel("ranks that share the metric")
    pictures.legend_above(figure, panels[0], columns=3)
    return figure
