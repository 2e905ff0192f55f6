"""`llqr bench step`: the time of a training step by method, compared with SGD's and SAM's in the same run."""

from collections.abc import Iterator, Sequence
from typing import Any

from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.methods import METHODS, step_of
from llqr.lab.bench.timing import Action, Clock, interleaved, quartiles, ratio
from llqr.lab.bench.workload import Passes, Setup, Workload
from llqr.lab.number_table import NumberTable, milliseconds, times

BURST = 0.1
"""Seconds of consecutive steps that are timed together."""


def measure(setup: Setup, forms: Sequence[Passes], settings: RefreshSettings, repeats: int) -> Iterator[dict[str, Any]]:
    """One row for every network, form of the passes and method."""
    for network in setup.networks:
        for passes in forms:
            yield from _rows(setup.workload(network, passes), settings, repeats)


def _rows(workload: Workload, settings: RefreshSettings, repeats: int) -> list[dict[str, Any]]:
    refresh = MeasuredRefresh(workload, settings)
    refresh.run_once_for_steps()
    actions = {method: Action(step_of(method, workload, refresh.geometry), repeats, BURST) for method in METHODS}
    seconds = interleaved(actions, Clock(workload.precision.device))
    return [
        {
            "model": workload.network.label,
            "passes": str(workload.passes),
            "method": method,
            "seconds": quartiles(own),
            "vs_sgd": ratio(own, seconds["SGD"]),
            "vs_sam": ratio(own, seconds["SAM"]),
        }
        for method, own in seconds.items()
    ]


def as_table(rows: Sequence[dict[str, Any]]) -> NumberTable:
    numbers = ("ms", "quartiles", "vs SGD", "quartiles", "vs SAM", "quartiles")
    table = NumberTable("step", "model", "passes", "method", numbers=numbers)
    for row in rows:
        ratios = *times(row["vs_sgd"]), *times(row["vs_sam"])
        table.add(row["model"], row["passes"], row["method"], *milliseconds(row["seconds"]), *ratios)
    return table
