"""`llqr bench solvers`: how far each inner solver brings the relaxed objective in a number of products with `H`.

Counts, not times: a refresh costs its products. Every solver starts from the same metric (the identity) on the same
quadratic model of an untrained network; the last column says after how many products it is at or below the objective of
the paper's heavy ball after all of its products.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from llqr import Inner, Metric
from llqr.curvature import QuadraticModel
from llqr.lab.bench.refreshing import Refreshing, geometry_for
from llqr.lab.bench.tables import Table, number
from llqr.lab.bench.workload import Network, Workload
from llqr.lab.training.precision import Precision
from llqr.solvers.solve import SOLVERS, Objective, working_copy

SHOWN = (0, 1, 2, 3, 5, 8, 15, 30, 50)
"""Numbers of products that the table has columns for; the file has all."""
PAPER = "heavy-ball"
INNER = {
    PAPER: Inner(PAPER),
    **{name: Inner(name) for name in SOLVERS if name != PAPER},
    f"{PAPER}, product every 5": Inner(PAPER, product_every=5),
}
"""Rows of the table; the first is the one that the others are measured by."""


class Counted:
    """A quadratic model that counts its products."""

    def __init__(self, inner: QuadraticModel) -> None:
        self._inner = inner
        self.loss, self.gradient = inner.loss, inner.gradient
        self.products = 0

    def product(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.products += 1
        return self._inner.product(v)


def measure(
    networks: Sequence[Network], structures: Sequence[str], batch: int, precision: Precision, refreshing: Refreshing
) -> Iterator[dict[str, Any]]:
    """One row for every network, structure and solver; one that refuses the structure says so."""
    for network in networks:
        for structure in structures:
            own = replace(refreshing, structure=structure)
            yield from _rows(Workload(network, batch, precision), own)


def _rows(workload: Workload, refreshing: Refreshing) -> Iterator[dict[str, Any]]:
    target = None
    with geometry_for(workload, refreshing).quadratic() as model:
        for solver, inner in INNER.items():
            row: dict[str, Any] = {
                "model": workload.network.label,
                "structure": refreshing.structure,
                "solver": solver,
            }
            try:
                objectives = curve(workload, model, refreshing, inner)
            except ValueError as error:
                yield row | {"refused": str(error)}
                continue
            if solver == PAPER:
                target = list(objectives.values())[-1]
            reached = next((spent for spent, value in objectives.items() if value <= target), None)
            yield row | {"objective": objectives, "products_to_target": reached}


def curve(workload: Workload, model: QuadraticModel, refreshing: Refreshing, inner: Inner) -> dict[int, float]:
    """Products spent -> the objective they led to, which the next step tells."""
    metric = Metric(workload.model, structure=refreshing.structure)
    counted = Counted(model)
    objective = Objective(metric, counted, damping=0.0)
    descent = SOLVERS[inner.solver](metric, working_copy(metric), inner)
    objectives = {}
    for step in count():
        if not inner.multiplies(step):
            descent.advance(objective)
            continue
        spent = counted.products
        if spent > refreshing.steps:
            break
        objectives[spent] = descent.step(objective)
    return {spent: float(value) for spent, value in objectives.items()}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Also of rows that were kept as JSON, whose keys are texts."""
    curves = [{int(count): value for count, value in row.get("objective", {}).items()} for row in rows]
    counts = [count for count in SHOWN if any(count in objectives for objectives in curves)]
    headings = (*(f"J, {count}" for count in counts), f"to {PAPER}")
    table = Table("solvers", "model", "structure", "solver", numbers=headings)
    for row, objectives in zip(rows, curves, strict=True):
        names = (row["model"], row["structure"], row["solver"])
        if "refused" in row:
            table.add(*names, "refused")
            continue
        needed = row["products_to_target"]
        cells = (number(objectives.get(count), ".5g") for count in counts)
        table.add(*names, *cells, "not reached" if needed is None else str(needed))
    table.explain(row["refused"] for row in rows if "refused" in row)
    return table
