"""`llqr bench step`: the time of a training step by method, compared with SGD's and SAM's in the same run.

All steps are made on one network: their times do not depend on its weights.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

import llqr
from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.timing import Action, interleaved, quartiles, ratio
from llqr.lab.bench.workload import Passes, Setup, Workload
from llqr.lab.config.settings import Base
from llqr.lab.number_table import Column, number_table

# Small, so that the weights stay finite however many steps are timed.
SGD = Base("sgd", lr=1e-4, weight_decay=5e-4, momentum=0.9)
ADAMW = Base("adamw", lr=1e-5, weight_decay=5e-4)

UNWRAPPED = {"SGD": SGD, "AdamW": ADAMW}
METHODS = (*UNWRAPPED, "SAM", "F-SAM", "LLQR", "LLQR+SAM")
"""As the paper's tables call them."""
BURST = 0.1
"""Seconds of consecutive steps that are timed together."""


def learns_metric(method: str) -> bool:
    return method.startswith("LLQR")


def step_of(method: str, workload: Workload, geometry: llqr.Geometry | None) -> Callable[[], object]:
    """One step on the workload's batch; a refresh, should one be due, learns from the same batch."""
    if method in UNWRAPPED:
        plain = UNWRAPPED[method].build(workload.model)
        run_pass = workload.closure(plain)
        return lambda: (run_pass(), plain.step())
    make = {"LLQR": llqr.Optimizer, "F-SAM": llqr.FriendlySAM}.get(method, llqr.SAM)
    own = geometry if learns_metric(method) else None
    optimizer = make(SGD.build(workload.model), geometry=own, model=workload.model)
    closure = workload.closure(optimizer)
    return lambda: optimizer.step(closure, batch=workload.batch)


def measure(setup: Setup, forms: Sequence[Passes], settings: RefreshSettings, repeats: int) -> Iterator[dict[str, Any]]:
    """One row for every network, form of the passes and method."""
    for network in setup.networks:
        for passes in forms:
            yield from _rows(setup.workload(network, passes), settings, repeats)


def _rows(workload: Workload, settings: RefreshSettings, repeats: int) -> list[dict[str, Any]]:
    refresh = MeasuredRefresh(workload, settings)
    refresh.run_once_for_steps()
    actions = {method: Action(step_of(method, workload, refresh.geometry), repeats, BURST) for method in METHODS}
    seconds = interleaved(actions, workload.clock)
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


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("ms", "seconds.median", "{:.2f}", 1e3),
        Column("quartiles", "seconds", "{:.2f}", 1e3),
        Column("vs SGD", "vs_sgd.median", "{:.3f}x"),
        Column("quartiles", "vs_sgd", "{:.3f}"),
        Column("vs SAM", "vs_sam.median", "{:.3f}x"),
        Column("quartiles", "vs_sam", "{:.3f}"),
    ]
    return number_table("step", rows, ("model", "passes", "method"), numbers)
