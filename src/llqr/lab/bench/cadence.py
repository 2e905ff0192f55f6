"""`llqr bench cadence`: the paper's table of epoch times by method and refresh interval, from measured times.

An epoch of N steps costs N steps and ceil(N / interval) refreshes, the first of them before the first step, as in the
paper's column of updates. The first refresh of a run, which also captures and compiles, is left out there and here.
Over many epochs there is one refresh every ``interval`` steps and no extra one: the long-run ratio.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from rich.table import Table

from llqr.lab.bench.refresh import RefreshSettings, geometry_of, learn
from llqr.lab.bench.timing import BURST, Action, interleaved, quartiles
from llqr.lab.bench.workload import Network, PassOptions, Setup, learns_metric, step_of
from llqr.lab.number_table import Column, number_table
from llqr.lab.results.tables import paper

METHODS = ("SGD", "AdamW", "SAM", "LLQR", "LLQR+SAM")
EPOCH_STEPS = 1563
"""100,000 images in batches of 64, which gives every interval as many updates as in the paper's table."""

ARCHITECTURES = {"vit-b": "ViT-B/16", "vit-l": "ViT-L/16"}


def measure(
    setup: Setup,
    settings: RefreshSettings,
    passes: PassOptions,
    repeats: int,
    refresh_repeats: int,
    epoch_steps: int,
    probe_every: int | None = None,
) -> Iterator[dict[str, Any]]:
    for network in setup.networks:
        workload = setup.workload(network, passes)
        geometry = geometry_of(workload, settings)
        first = workload.clock.seconds(partial(learn, geometry, workload))
        actions = {method: Action(step_of(method, workload, geometry), repeats, BURST) for method in METHODS}
        actions["refresh"] = Action(partial(geometry.refresh, workload.batch), refresh_repeats, warm_up=1)
        yield from rows(workload.network, interleaved(actions, workload.clock), first, epoch_steps, probe_every)


def rows(
    network: Network,
    measured: Mapping[str, Sequence[float]],
    first: float,
    epoch_steps: int,
    probe_every: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The table of one network, from seconds of the methods' steps and of the "refresh", round by round.

    With ``probe_every`` also for a probe in one step of this many: the others are those of SGD or LLQR.

    Ratios are taken round by round, with the median time of a refresh; the ``first`` one also captures and compiles.
    """
    refresh = quartiles(measured["refresh"])
    steps = {method: np.array(measured[method]) for method in METHODS}
    passes = dict.fromkeys(METHODS, 1.0) | {"SAM": 2.0, "LLQR+SAM": 2.0}
    if probe_every is not None:
        for dense, between in (("SAM", "SGD"), ("LLQR+SAM", "LLQR")):
            sparse = f"{dense}, every {probe_every}"
            steps[sparse] = steps[between] + (steps[dense] - steps[between]) / probe_every
            passes[sparse] = 1 + 1 / probe_every
    for method in steps:
        for interval in intervals() if learns_metric(method) else (None,):
            updates = 0 if interval is None else math.ceil(epoch_steps / interval)
            epoch = epoch_steps * steps[method] + updates * refresh["median"]
            long_run = steps[method] + (0 if interval is None else refresh["median"] / interval)
            row: dict[str, Any] = {
                "model": network.label,
                "method": method,
                "passes": passes[method],
                "interval": interval,
                "updates": None if interval is None else updates,
                "step_seconds": quartiles(steps[method]),
                "epoch_seconds": quartiles(epoch),
                "vs_sgd": quartiles(epoch / (epoch_steps * steps["SGD"])),
                "vs_sam": quartiles(epoch / (epoch_steps * steps["SAM"])),
                "lasting_vs_sam": quartiles(long_run / steps["SAM"]),
            }
            if interval is not None:
                row |= {"refresh_seconds": refresh, "first_refresh_seconds": first}
            yield row | {"paper": printed(network, method, interval)}


@cache
def intervals() -> tuple[int, ...]:
    """The paper's refresh intervals."""
    return tuple(sorted({row["interval"] for row in paper()["cadence"]["rows"]} - {None}))


def printed(network: Network, method: str, interval: int | None) -> dict[str, float | None] | None:
    """The paper's row with its ratios; None for a network that is not in the paper."""
    architecture = ARCHITECTURES.get(network.label)
    own = {(row["method"], row["interval"]): row for row in paper()["cadence"]["rows"] if row["arch"] == architecture}
    row = own.get((method, interval))
    if row is None:
        return None
    return {
        "epoch_seconds": row["epoch_s"],
        "vs_sgd": row["epoch_s"] / own["SGD", None]["epoch_s"],
        "vs_sam": row["epoch_s"] / own["SAM", None]["epoch_s"],
        "updates": row["updates"],
        "refresh_seconds": row["steady_update_s"],
    }


def as_table(found: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("passes", "passes", "{:.2f}"),
        Column("interval", "interval", "{:d}"),
        Column("updates", "updates", "{:d}"),
        Column("epoch s", "epoch_seconds.median", "{:.2f}"),
        Column("vs SGD", "vs_sgd.median", "{:.2f}"),
        Column("vs SAM", "vs_sam.median", "{:.3f}"),
        Column("quartiles", "vs_sam", "{:.3f}"),
        Column("long-run vs SAM", "lasting_vs_sam.median", "{:.3f}"),
        Column("refresh s", "refresh_seconds.median", "{:.3f}"),
        Column("paper: vs SGD", "paper.vs_sgd", "{:.2f}"),
        Column("vs SAM", "paper.vs_sam", "{:.2f}"),
        Column("refresh s", "paper.refresh_seconds", "{:.2f}"),
    ]
    return number_table("cadence", found, ("model", "method"), numbers)
