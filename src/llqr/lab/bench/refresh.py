"""`llqr bench refresh`: the time of a refresh by engine and structure, what it goes to, and how exact its result is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from llqr.lab.bench.clock import Clock
from llqr.lab.bench.errors import DTYPES, Reference, reference_for
from llqr.lab.bench.methods import step_of
from llqr.lab.bench.refreshing import Refreshing, geometry_for
from llqr.lab.bench.sampling import Action, Sample, interleaved
from llqr.lab.bench.step import BURST
from llqr.lab.bench.tables import Table, number, seconds
from llqr.lab.bench.workload import Network, Passes, Workload
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.training.precision import Precision

ROUNDS_OF_STEPS = 2
"""SGD steps are timed so many times as often as refreshes; one of them takes a tiny part of the time."""


def measure(
    networks: Sequence[Network],
    structures: Sequence[str],
    engines: Sequence[str],
    product_every: Sequence[int],
    batch: int,
    precision: Precision,
    refreshing: Refreshing,
    passes: Passes,
    repeats: int,
    reference: str | None,
) -> Iterator[dict[str, Any]]:
    """A row for every network, structure, engine and number of steps to a product; one that is refused says so."""
    for network in networks:
        for structure in structures:
            own = replace(refreshing, structure=structure)
            exact = _reference(Workload(network, batch, precision), own, reference)
            for engine, every in product(engines, product_every):
                way = replace(own, engine=engine, product_every=every)
                yield _row(Workload(network, batch, precision, passes), way, repeats, exact)


def _reference(workload: Workload, refreshing: Refreshing, dtype: str | None) -> Reference | None:
    return None if dtype is None else reference_for(workload, refreshing, DTYPES[dtype])


def _row(workload: Workload, refreshing: Refreshing, repeats: int, exact: Reference | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": workload.network.label,
        "parameters": workload.parameters,
        "structure": refreshing.structure,
        "engine": refreshing.engine,
        "product_every": refreshing.product_every,
    }
    clock = Clock(workload.precision.device)
    try:
        geometry = geometry_for(workload, refreshing)
        report, row["first_seconds"] = clock.timed(geometry.learn)
    except ConfigurationError as error:
        return row | {"refused": str(error)}
    row |= {"engine": report.engine, "accepted": report.accepted, "reason": report.reason}
    if exact is not None:  # before a step moves the weights
        row |= {"errors": exact.errors(geometry, report.accepted), "reference_reason": exact.reason}
    actions = {
        "refresh": Action(geometry.learn, repeats, warm_up=1),
        "SGD": Action(step_of("SGD", workload, None), ROUNDS_OF_STEPS * repeats, BURST),
    }
    measured = interleaved(actions, clock)
    refresh, step = Sample.of(measured["refresh"]), Sample.of(measured["SGD"])
    return row | {
        "products": refreshing.products,
        "seconds": refresh.to_dict(),
        "seconds_a_product": refresh.median / refreshing.products,
        "sgd_step_seconds": step.to_dict(),
        "sgd_steps_a_product": refresh.median / refreshing.products / step.median,
        "split": None if refreshing.capture else geometry.split(),
    }


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Per product the whole refresh is counted; the split gives a product alone."""
    headings = ("s", "quartiles", "first s", "ms/Hv", "SGD steps/Hv")
    parts = ("linearise s", "Hv s", "factors s")
    faults = ("error Hg", "error Hv", "error Ug")
    table = Table("refresh", "model", "structure", "engine", numbers=("product every", *headings, *parts, *faults))
    for row in rows:
        names = (row["model"], row["structure"], row["engine"])
        if "refused" in row:
            table.add(*names, "refused")
            continue
        split, errors = row["split"] or {}, row.get("errors", {})
        table.add(
            *names,
            number(row.get("product_every"), "d"),  # kept rows may be older; their command tells
            *seconds(row["seconds"]),
            number(row["first_seconds"], ".2f"),
            number(1e3 * row["seconds_a_product"], ".2f"),
            number(row["sgd_steps_a_product"], ".2f"),
            *(number(split.get(part), ".3f") for part in ("linearise", "products", "factors")),
            *(number(errors.get(key), ".1e") for key in ("Hv, v = g", "Hv, v random", "Ug")),
        )
    table.explain(row["refused"] for row in rows if "refused" in row)
    return table
