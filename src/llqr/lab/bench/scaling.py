"""`llqr bench scaling`: how the time of a refresh grows with the number of parameters."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from llqr.lab.bench.refresh import RefreshSettings, geometry_of
from llqr.lab.bench.timing import Action, interleaved, quartiles
from llqr.lab.bench.workload import Setup
from llqr.lab.number_table import Column, number_table
from llqr.lab.results.tables import paper


def measure(setup: Setup, settings: RefreshSettings, repeats: int) -> Iterator[dict[str, Any]]:
    for workload in map(setup.workload, setup.networks):
        geometry = geometry_of(workload, settings)
        refresh = partial(geometry.refresh, workload.batch)
        first = workload.clock.seconds(refresh)
        times = interleaved({"refresh": Action(refresh, repeats, warm_up=1)}, workload.clock)["refresh"]
        row = {"model": workload.network.label, "parameters": workload.parameters, "engine": geometry.engine}
        yield row | {"first_seconds": first, "seconds": quartiles(times), "repeats": times}


def conclusion(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The power of the number of parameters, fitted to every repeat, and the paper's; empty for a single network."""
    if len({row["parameters"] for row in rows}) < 2:
        return {}
    times = np.array([row["repeats"] for row in rows])
    fitted, _ = np.polyfit(np.log([row["parameters"] for row in rows]), np.log(times), 1)  # a line for every repeat
    return {"exponent": quartiles(fitted), "paper_exponent": paper()["scaling-exponent"]["value"]}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("parameters", "parameters", "{:,}"),
        Column("refresh s", "seconds.median", "{:.3f}"),
        Column("quartiles", "seconds", "{:.3f}"),
        Column("first s", "first_seconds", "{:.2f}"),
    ]
    table = number_table("scaling", rows, ("model", "engine"), numbers)
    if found := conclusion(rows):
        ours, theirs = found["exponent"], " to ".join(map(str, found["paper_exponent"]))
        fit = f"P^{ours['median']:.3f} ({ours['low']:.3f} .. {ours['high']:.3f})"
        table.caption = f"refresh time grows as {fit}; paper: P^{theirs}"
    return table
