"""`llqr bench scaling`: how the time of a refresh grows with the number of parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llqr.lab.bench.clock import Clock
from llqr.lab.bench.refreshing import Refreshing, geometry_for
from llqr.lab.bench.sampling import Action, Sample, interleaved
from llqr.lab.bench.tables import Table, number, seconds
from llqr.lab.bench.workload import Network, Workload
from llqr.lab.results import paper_table as paper
from llqr.lab.training.precision import Precision


def measure(
    networks: Sequence[Network], batch: int, precision: Precision, refreshing: Refreshing, repeats: int
) -> Iterator[dict[str, Any]]:
    """One row a network, one network after the other: together they need not fit the device."""
    for network in networks:
        yield _row(Workload(network, batch, precision), refreshing, repeats)


def _row(workload: Workload, refreshing: Refreshing, repeats: int) -> dict[str, Any]:
    clock = Clock(workload.precision.device)
    geometry = geometry_for(workload, refreshing)
    first = clock.seconds(geometry.learn)
    measured = interleaved({"refresh": Action(geometry.learn, repeats, warm_up=1)}, clock)["refresh"]
    return {
        "model": workload.network.label,
        "parameters": workload.parameters,
        "engine": geometry.engine,
        "first_seconds": first,
        "seconds": Sample.of(measured).to_dict(),
        "repeats": measured,
    }


def exponent(parameters: Sequence[int], times: Sequence[float]) -> float:
    """The power of the number of parameters that the times grow with: least squares on logarithms."""
    return float(np.polyfit(np.log(parameters), np.log(times), 1)[0])


def conclusion(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The exponent fitted to every repeat, beside the paper's; nothing to fit to a single network."""
    if len({row["parameters"] for row in rows}) < 2:
        return {}
    parameters = [row["parameters"] for row in rows]
    fitted = [exponent(parameters, times) for times in zip(*(row["repeats"] for row in rows), strict=True)]
    return {"exponent": Sample.of(fitted).to_dict(), "paper_exponent": paper.paper()["scaling-exponent"]["value"]}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("scaling", "model", "engine", numbers=("parameters", "refresh s", "quartiles", "first s"))
    for row in rows:
        count = number(row["parameters"], ",")
        table.add(row["model"], row["engine"], count, *seconds(row["seconds"]), number(row["first_seconds"], ".2f"))
    found = conclusion(rows)
    if found:
        ours, theirs = found["exponent"], " to ".join(map(str, found["paper_exponent"]))
        table.caption = (
            f"refresh time grows as P^{ours['median']:.3f} ({ours['low']:.3f} .. {ours['high']:.3f}); paper: P^{theirs}"
        )
    return table
