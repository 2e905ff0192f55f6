"""`llqr bench refresh`: the time of a refresh by engine and structure, its parts, and how exact its result is."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.numerical_error import ExactRefresh
from llqr.lab.bench.step import BURST, step_of
from llqr.lab.bench.timing import Action, Clock, interleaved, quartiles
from llqr.lab.bench.workload import Passes, Setup, Workload
from llqr.lab.number_table import NumberTable, number, seconds

STEPS_PER_REFRESH = 2
"""How many SGD steps are timed per refresh; a step takes a small part of the time."""


def measure(
    setup: Setup, ways: Sequence[RefreshSettings], passes: Passes, repeats: int, reference: torch.dtype | None
) -> Iterator[dict[str, Any]]:
    """A row for every network and way to learn a metric, with an error message for one that is refused.

    With ``reference``, also the errors against exact refreshes in that precision.
    """
    for network in setup.networks:
        exact: dict[RefreshSettings, ExactRefresh] = {}
        for settings in ways:
            alike = settings.exact()
            if reference is not None and alike not in exact:
                exact = {alike: ExactRefresh.of(setup.workload(network), alike, reference)}
            yield _row(setup.workload(network, passes), settings, repeats, exact.get(alike))


def _row(workload: Workload, settings: RefreshSettings, repeats: int, exact: ExactRefresh | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": workload.network.label,
        "parameters": workload.parameters,
        "structure": settings.structure,
        "engine": settings.runtime.engine,
        "product_every": settings.inner.product_every,
    }
    clock = Clock(workload.precision.device)
    try:
        refresh = MeasuredRefresh(workload, settings)
        report, row["first_seconds"] = clock.timed(refresh.run)
    except ValueError as error:
        return row | {"refused": str(error)}
    row |= {"engine": report.engine, "accepted": report.accepted, "reason": report.reason}
    if exact is not None:  # before a step moves the weights
        row |= {"errors": exact.errors(refresh, report.accepted), "reference_reason": exact.reason}
    actions = {
        "refresh": Action(refresh.run, repeats, warm_up=1),
        "SGD": Action(step_of("SGD", workload, None), STEPS_PER_REFRESH * repeats, BURST),
    }
    measured = interleaved(actions, clock)
    spent, step = quartiles(measured["refresh"]), quartiles(measured["SGD"])
    return row | {
        "products": settings.products,
        "seconds": spent,
        "seconds_a_product": spent["median"] / settings.products,
        "sgd_step_seconds": step,
        "sgd_steps_a_product": spent["median"] / settings.products / step["median"],
        "split": None if settings.runtime.capture else refresh.split(),
    }


def as_table(rows: Sequence[dict[str, Any]]) -> NumberTable:
    """The time per product is that of the whole refresh over its products; the split gives a product alone."""
    headings = ("s", "quartiles", "first s", "ms/Hv", "SGD steps/Hv")
    parts = ("linearise s", "Hv s", "factors s")
    exactness = ("error Hg", "error Hv", "error Ug")
    numbers = ("product every", *headings, *parts, *exactness)
    table = NumberTable("refresh", "model", "structure", "engine", numbers=numbers)
    for row in rows:
        names = (row["model"], row["structure"], row["engine"])
        if "refused" in row:
            table.add(*names, "refused")
            continue
        split, errors = row["split"] or {}, row.get("errors", {})
        table.add(
            *names,
            number(row.get("product_every"), "d"),  # older files lack it; see their command
            *seconds(row["seconds"]),
            number(row["first_seconds"], ".2f"),
            number(1e3 * row["seconds_a_product"], ".2f"),
            number(row["sgd_steps_a_product"], ".2f"),
            *(number(split.get(part), ".3f") for part in ("linearise", "products", "factors")),
            *(number(errors.get(key), ".1e") for key in ("Hv, v = g", "Hv, v random", "Ug")),
        )
    table.explain(row["refused"] for row in rows if "refused" in row)
    return table
