"""The inner loop of a refresh: its settings, what each step does, and the loop itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from llqr.checks import check_inner
from llqr.curvature.divergence import Scale
from llqr.curvature.quadratic import QuadraticModel
from llqr.inner.objective import Objective
from llqr.inner.solvers import SOLVERS, Solver
from llqr.metric import Factors
from llqr.schedule import Schedule

#: One step of the inner loop. "first" reads the objective at the start and moves; "product" moves, with a product with
#: `H`; "extrapolate" moves, with `H v` extrapolated from earlier products; "last" reads the objective at the end. The
#: guards compare the two objectives, which may differ by less than a lower precision rounds away: "first" and "last"
#: run in the factors' own precision, whatever the steps between them run in.
Step = Literal["first", "product", "extrapolate", "last"]


@dataclass(frozen=True)
class Inner:
    """How a refresh minimises the objective `J(U)`.

    Attributes:
        solver: "heavy-ball" (the paper's) or "adam"; for scalar and diagonal metrics also "pcg", preconditioned
            conjugate gradients that start from the best multiple.
        steps: inner steps per refresh; one more product with H reads the objective at the end.
        lr: step size of heavy ball and adam, a number or a function of the optimizer step.
        momentum: of heavy ball; zero at the start of every refresh.
        clip: bound on the norm of each factor's gradient (of each layer's for diagonal and scalar); pcg has none.
        product_every: of heavy ball and adam: after the first two steps, only one inner step in so many makes a product
            with H; the others extrapolate H U g from earlier products, because H is linear.
        curvature_scale: "sum", "mean" or a number that multiplies the curvature of the mean loss (default: the
            divergence's; "sum" for ngd, where the curvature weighs the inner batch size times the linear term).
        normalise: scale U so that g.Ug = g.g on the inner batch, so that learning rates and radii keep their meaning.
        debias: give the t-th refresh the weight 1 / t until that falls below 1 - ema, so that the moving average does
            not remember the identity it starts from.

    Example:
        >>> Inner("pcg", steps=10).solver
        'pcg'
    """

    solver: str = "heavy-ball"
    steps: int = 50
    lr: Schedule = 1e-3
    momentum: float = 0.9
    clip: float = 5.0
    product_every: int = 1
    curvature_scale: Scale | None = None
    normalise: bool = False
    debias: bool = False

    def __post_init__(self) -> None:
        check_inner(self, SOLVERS)

    def plan(self) -> tuple[Step, ...]:
        """What each step of a refresh does; the last one only reads the objective.

        The first two moves make a product of their own, because an extrapolation needs two; after them one move in
        `product_every` does.

        Example:
            >>> Inner(steps=5, product_every=3).plan()
            ('first', 'product', 'extrapolate', 'product', 'extrapolate', 'last')
        """
        between: list[Step] = [
            "product" if k < 2 or k % self.product_every == 0 else "extrapolate" for k in range(1, self.steps)
        ]
        return ("first", *between, "last")


@dataclass(frozen=True)
class Solution:
    """Factors after the inner loop, and the objective at its start and end (device scalars, not yet read)."""

    factors: list[Factors]
    before: Tensor
    after: Tensor
    quadratic: QuadraticModel


def solve(objective: Objective, inner: Inner, lr: float) -> Solution:
    """Minimise `J` over the factors of `U`, from the metric's current ones; does not change the metric itself."""
    metric = objective.metric
    if not metric.stored():  # the identity throughout
        value = objective.exact.at(metric.factors()).value
        return Solution(metric.factors(), value, value, objective.quadratic)
    solver = SOLVERS[inner.solver](metric, inner, lr)
    values: dict[Step, Tensor] = {}
    for step in inner.plan():
        reading = perform(step, solver, objective)
        if reading is not None:
            values[step] = reading
    return Solution(solver.factors, values["first"], values["last"], objective.quadratic)


def perform(step: Step, solver: Solver, objective: Objective) -> Tensor | None:
    """Do one step of a plan; returns the objective where the step reads it."""
    if step == "first":
        return solver.step(objective.exact)
    if step == "last":
        return solver.value(objective)
    solver.advance(objective, product=step == "product")
    return None
