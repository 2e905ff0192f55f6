"""`llqr bench scaling`: how the time of a refresh grows with the number of parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.timing import Action, interleaved, quartiles
from llqr.lab.bench.workload import Setup, Workload
from llqr.lab.number_table import Column, number_table
from llqr.lab.results.tables import paper


def measure(setup: Setup, settings: RefreshSettings, repeats: int) -> Iterator[dict[str, Any]]:
    return (_row(setup.workload(network), settings, repeats) for network in setup.networks)


def _row(workload: Workload, settings: RefreshSettings, repeats: int) -> dict[str, Any]:
    refresh = MeasuredRefresh(workload, settings)
    first = workload.clock.seconds(refresh.run)
    measured = interleaved({"refresh": Action(refresh.run, repeats, warm_up=1)}, workload.clock)["refresh"]
    return {
        "model": workload.network.label,
        "parameters": workload.parameters,
        "engine": refresh.geometry.engine,
        "first_seconds": first,
        "seconds": quartiles(measured),
        "repeats": measured,
    }


def exponent(parameters: Sequence[int], times: Sequence[float]) -> float:
    """The power of the number of parameters with which the times grow, by least squares on logarithms."""
    return float(np.polyfit(np.log(parameters), np.log(times), 1)[0])


def conclusion(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The exponent fitted to every repeat, and the paper's; empty for a single network, which has none."""
    if len({row["parameters"] for row in rows}) < 2:
        return {}
    parameters = [row["parameters"] for row in rows]
    fitted = [exponent(parameters, times) for times in zip(*(row["repeats"] for row in rows), strict=True)]
    return {"exponent": quartiles(fitted), "paper_exponent": paper()["scaling-exponent"]["value"]}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("parameters", "parameters", "{:,}"),
        Column("refresh s", "seconds.median", "{:.3f}"),
        Column("quartiles", "seconds", "{:.3f}"),
        Column("first s", "first_seconds", "{:.2f}"),
    ]
    table = number_table("scaling", rows, ("model", "engine"), numbers)
    found = conclusion(rows)
    if found:
        ours, theirs = found["exponent"], " to ".join(map(str, found["paper_exponent"]))
        table.caption = (
            f"refresh time grows as P^{ours['median']:.3f} ({ours['low']:.3f} .. {ours['high']:.3f}); paper: P^{theirs}"
        )
    return table
