"""`llqr bench solvers`: how far each inner solver lowers the relaxed objective with a number of products with `H`.

It counts products instead of measuring times, because the products dominate the cost of a refresh. Every solver starts
from the same metric (the identity) on the same quadratic model of an untrained network. The last column is the number
of products after which a solver is at or below the objective that the paper's heavy ball reaches with all of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table
from torch import Tensor

from llqr import Inner, Metric
from llqr.curvature import QuadraticModel
from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.workload import Setup, Workload
from llqr.lab.number_table import Column, number_table
from llqr.refresh.inner_loop import InnerProblem, perform
from llqr.schedule import at
from llqr.solvers import SOLVERS

SHOWN = (0, 1, 2, 3, 5, 8, 15, 30, 50)
"""Numbers of products that the table has columns for; the file has all."""
PAPER = "heavy-ball"
INNER = {
    PAPER: Inner(PAPER),
    **{name: Inner(name) for name in SOLVERS if name != PAPER},
    f"{PAPER}, product every 5": Inner(PAPER, product_every=5),
}
"""Rows of the table; the others are compared with the first."""


def measure(setup: Setup, structures: Sequence[RefreshSettings], products: int) -> Iterator[dict[str, Any]]:
    """One row for every network, structure and solver; a solver that refuses the structure says why."""
    for network in setup.networks:
        for settings in structures:
            yield from _rows(setup.workload(network), settings, products)


def _rows(workload: Workload, settings: RefreshSettings, products: int) -> Iterator[dict[str, Any]]:
    target = float("-inf")
    with MeasuredRefresh(workload, settings).quadratic_model() as model:
        for solver, inner in INNER.items():
            row = {"model": workload.network.label, "structure": settings.structure, "solver": solver}
            try:
                objectives = curve(Metric(workload.model, structure=settings.structure), model, inner, products)
            except ValueError as error:
                yield row | {"refused": str(error)}
                continue
            if solver == PAPER:
                target = objectives[products]
            reached = next((spent for spent, value in objectives.items() if value <= target), None)
            yield row | {"objective": objectives, "products_to_target": reached}


def curve(metric: Metric, model: QuadraticModel, inner: Inner, products: int) -> dict[int, float]:
    """Products spent -> the objective reached with them, evaluated by products that are not counted."""
    spent = 0

    def counted(v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        nonlocal spent
        spent += 1
        return model.product(v)

    problem = InnerProblem(metric, replace(inner, steps=products * inner.product_every + 1))  # more than enough
    objective, exact = problem.objective(replace(model, product=counted)), problem.objective(model)
    solver = problem.solver(at(inner.lr, 0, "lr", 0))
    assert solver is not None
    objectives: dict[int, float] = {}
    for step in problem.plan():
        if step.multiplies:
            objectives[spent] = float(exact.at(solver.factors).value)
            if spent >= products:
                break
        perform(step, solver, objective)
    return objectives


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Also of rows read from JSON, whose keys are strings."""
    shown = [dict(row) for row in rows]
    for row in shown:
        row["objective"] = {str(count): value for count, value in row.get("objective", {}).items()}
        if row.get("products_to_target", 0) is None:
            row["products_to_target"] = "not reached"
    counts = [count for count in map(str, SHOWN) if any(count in row["objective"] for row in shown)]
    numbers = [Column(f"J, {count}", f"objective.{count}", "{:.5g}") for count in counts]
    reached = Column(f"to {PAPER}", "products_to_target", "{}")
    return number_table("solvers", shown, ("model", "structure", "solver"), [*numbers, reached])
