"""`llqr bench step`: the time of a training step by method, beside that of SGD in the same run."""

from collections.abc import Iterator, Sequence
from typing import Any

from llqr.lab.bench.clock import Clock
from llqr.lab.bench.methods import METHODS, step_of
from llqr.lab.bench.refreshing import Refreshing, geometry_for
from llqr.lab.bench.sampling import Action, Sample, interleaved, ratio
from llqr.lab.bench.tables import Table, milliseconds, times
from llqr.lab.bench.workload import Network, Passes, Workload
from llqr.lab.training.precision import Precision

BURST = 0.1
"""Seconds of steps in a row that are timed together."""


def measure(
    networks: Sequence[Network],
    forms: Sequence[Passes],
    batch: int,
    precision: Precision,
    refreshing: Refreshing,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """One row for every network, form of the passes and method."""
    for network in networks:
        for passes in forms:
            yield from _rows(Workload(network, batch, precision, passes), refreshing, repeats)


def _rows(workload: Workload, refreshing: Refreshing, repeats: int) -> list[dict[str, Any]]:
    geometry = geometry_for(workload, refreshing)
    geometry.pretend()
    actions = {method: Action(step_of(method, workload, geometry), repeats, BURST) for method in METHODS}
    seconds = interleaved(actions, Clock(workload.precision.device))
    return [
        {
            "model": workload.network.label,
            "passes": str(workload.passes),
            "method": method,
            "seconds": Sample.of(own).to_dict(),
            "vs_sgd": ratio(own, seconds["SGD"]).to_dict(),
            "vs_sam": ratio(own, seconds["SAM"]).to_dict(),
        }
        for method, own in seconds.items()
    ]


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "step", "model", "passes", "method", numbers=("ms", "quartiles", "vs SGD", "quartiles", "vs SAM", "quartiles")
    )
    for row in rows:
        table.add(
            row["model"],
            row["passes"],
            row["method"],
            *milliseconds(row["seconds"]),
            *times(row["vs_sgd"]),
            *times(row["vs_sam"]),
        )
    return table
