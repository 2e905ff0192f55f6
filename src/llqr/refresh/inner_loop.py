"""The inner loop: minimise the relaxed LQR objective over the factors of `U`, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llqr.cuda_graphs import Branches
from llqr.curvature.quadratic import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.schedule import at
from llqr.solvers import SOLVERS, Inner, Objective, Solver, SolverSettings, Step
from llqr.solvers.damping import Damping


@dataclass(frozen=True)
class InnerProblem:
    """What a refresh solves, apart from the batch: a metric, and how its factors are learned.

    Attributes:
        damping: weight of `1/2 |delta|^2` in the objective, a number or a share of the curvature.
        precision: of the factors' matrix products, see `Objective`.
        fuse: run the steps of large stacks of matrices through `torch.compile`.
    """

    metric: Metric
    inner: Inner
    damping: Damping | float = 0.0
    precision: torch.dtype | None = None
    fuse: bool = False

    def objective(self, quadratic: QuadraticModel, branches: Branches | None = None) -> Objective:
        return Objective(self.metric, quadratic, self.damping, self.precision, branches)

    def plan(self) -> tuple[Step, ...]:
        """What each step does; a metric without factors (the identity throughout) only has its objective read."""
        return self.inner.plan() if self.metric.whole.stored() else (Step.LAST,)

    def solver(self, lr: float | Tensor) -> Solver | None:
        """A solver at the metric's current factors; None if there are none."""
        if not self.metric.stored():
            return None
        inner = self.inner
        settings = SolverSettings(lr, inner.momentum, inner.clip, inner.product_every > 1, self.fuse)
        return SOLVERS[inner.solver](self.metric, working_copy(self.metric), settings)


@dataclass(frozen=True)
class Solution:
    """Factors after the inner loop, and the objective at its start and end (device scalars, not yet read)."""

    factors: list[Factors]
    before: Tensor
    after: Tensor


class Loop(Protocol):
    """An inner loop that is run one step at a time; `done` counts the steps of its plan."""

    done: int

    @property
    def plan(self) -> tuple[Step, ...]: ...
    @property
    def quadratic(self) -> QuadraticModel: ...
    def advance(self) -> None: ...
    def solution(self) -> Solution: ...


class InnerLoop:
    """The inner loop on one quadratic model, from the metric's current factors; the metric itself is not changed."""

    def __init__(self, problem: InnerProblem, quadratic: QuadraticModel, step: int = 0) -> None:
        self.plan = problem.plan()
        self.done = 0
        self._objective = problem.objective(quadratic)
        self._solver = problem.solver(at(problem.inner.lr, step, "lr", 0))
        self._values: dict[Step, Tensor] = {}

    @property
    def quadratic(self) -> QuadraticModel:
        return self._objective.quadratic

    def advance(self) -> None:
        step = self.plan[self.done]
        value = perform(step, self._solver, self._objective)
        if value is not None:
            self._values[step] = value
        self.done += 1

    def solution(self) -> Solution:
        """What was learned, when all steps are done."""
        return solution_of(self._solver, self._objective, self._values)


def perform(step: Step, solver: Solver | None, objective: Objective) -> Tensor | None:
    """Do one step of a plan; returns the objective where the step reads it."""
    if solver is None:
        return objective.exact.at(objective.metric.factors()).value
    if step is Step.LAST:
        return solver.value(objective)
    if step is Step.FIRST:
        return solver.step(objective.exact)
    if step is Step.EXTRAPOLATE:
        solver.extrapolate(objective)
    else:
        solver.advance(objective)
    return None


def solution_of(solver: Solver | None, objective: Objective, values: dict[Step, Tensor]) -> Solution:
    """What was learned; nothing without a solver, where every group is the identity."""
    factors = objective.metric.factors() if solver is None else solver.factors
    after = values[Step.LAST]
    return Solution(factors, values.get(Step.FIRST, after), after)


def working_copy(metric: Metric) -> list[Factors]:
    """The metric's factors in the dtype they are learned in, free to be changed."""
    return [
        {
            name: factor.detach().to(metric.learning_dtype(group), copy=True).contiguous()
            for name, factor in factors.items()
        }
        for group, factors in zip(metric.groups, metric.factors(), strict=True)
    ]
