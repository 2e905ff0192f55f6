"""The inner loop: minimise the relaxed LQR objective over the factors of `U`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llqr.curvature import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.metric.clipping import clip
from llqr.solvers.extrapolate import KnownProducts
from llqr.solvers.fused_descent import descend, is_fused
from llqr.solvers.line_search import ConjugateGradients, LineSearch
from llqr.solvers.objective import Objective

__all__ = ["SOLVERS", "Descent", "Inner", "InnerLoop", "Objective", "Solution", "solve", "working_copy"]


@dataclass(frozen=True)
class Inner:
    """Settings of the inner loop.

    Attributes:
        solver: "heavy-ball" (the paper's) or "adam"; where the objective is quadratic in the factors, or in each of
            two sets of them (kfac, diag-kfac), also "line-search" (heavy ball with exact steps) and "cg".
        steps: how many, each with a product with `H`, before the last objective is read.
        product_every: of heavy ball and adam: after the first two steps only every so many make a product with `H`;
            those between take what they need of it from the last products, because `H` is linear.
        lr: step size of heavy ball and adam.
        momentum: of heavy ball and line search, zero at every refresh.
        clip: bound on the norm of each factor's gradient (of each layer's for diagonal and scalar), but in cg.
        damping: weight of `1/2 |delta|^2` in the objective.
        compile: fuse the heavy-ball steps of large stacks of matrices, by `torch.compile`.

    Example:
        >>> Inner("cg", steps=10)
        Inner(solver='cg', steps=10, lr=0.001, momentum=0.9, clip=5.0, damping=0.0, product_every=1, compile=False)
    """

    solver: str = "heavy-ball"
    steps: int = 50
    lr: float = 1e-3
    momentum: float = 0.9
    clip: float = 5.0
    damping: float = 0.0
    product_every: int = 1
    compile: bool = False

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"solver: unknown {self.solver!r}; choose one of {', '.join(SOLVERS)}")
        whole = {"steps": 1, "product_every": 1}
        for name, lower in (whole | {"lr": 0, "momentum": 0, "clip": 0, "damping": 0}).items():
            value = getattr(self, name)
            if not hasattr(value, "__index__" if name in whole else "__float__"):
                raise TypeError(f"{name}: expected a {'whole ' if name in whole else ''}number, got {value!r}")
            if not value >= lower:
                raise ValueError(f"{name}: expected a number >= {lower}, got {value!r}")
        if self.product_every > 1 and SOLVERS[self.solver] is not Descent:
            raise ValueError(f"product_every: not with solver={self.solver!r}, whose steps are made of their products")

    def multiplies(self, step: int) -> bool:
        """Whether this step, counted from 0, makes a product with `H`."""
        return step < 2 or step % self.product_every == 0


@dataclass(frozen=True)
class Solution:
    """Factors after the inner loop, and the objective at its start and end (device scalars, not yet read)."""

    factors: list[Factors]
    before: Tensor
    after: Tensor


class Solver(Protocol):
    """Changes factors in place, one product with `H` a step."""

    factors: list[Factors]

    def step(self, objective: Objective) -> Tensor:
        """One step; returns the objective it started from."""

    def advance(self, objective: Objective) -> None:
        """One step, without working out the objective."""


class InnerLoop:
    """The inner loop on one quadratic model, from the metric's current factors, a step at a time.

    The metric itself is not changed. `precision` is that of the factors' matrix products, see `Objective`.
    """

    def __init__(
        self, metric: Metric, curvature: QuadraticModel, inner: Inner, precision: torch.dtype | None = None
    ) -> None:
        self.curvature = curvature
        self._objective = Objective(metric, curvature, inner.damping, precision)
        self._factors = working_copy(metric)
        learns = any(self._factors)  # not if it is the identity throughout
        self._solver = SOLVERS[inner.solver](metric, self._factors, inner) if learns else None
        self.total = inner.steps + 1 if learns else 1
        self.done = 0
        self._before: Tensor | None = None
        self._after: Tensor | None = None

    def advance(self) -> None:
        """One step, or at the end the product with `H` that only reads the objective."""
        # The two objectives that are compared are exact: between them may lie less than a lower precision rounds away.
        if self._solver is None or self.done == self.total - 1:
            self._after = self._objective.exact.at(self._factors).value
        elif self.done == 0:
            self._before = self._solver.step(self._objective.exact)
        else:
            self._solver.advance(self._objective)
        self.done += 1

    def solution(self) -> Solution:
        """What was learned, when all is done."""
        assert self._after is not None
        return Solution(self._factors, self._after if self._before is None else self._before, self._after)


def solve(metric: Metric, curvature: QuadraticModel, inner: Inner, precision: torch.dtype | None = None) -> Solution:
    """Run the inner loop to its end."""
    loop = InnerLoop(metric, curvature, inner, precision)
    while loop.done < loop.total:
        loop.advance()
    return loop.solution()


def working_copy(metric: Metric) -> list[Factors]:
    """The metric's factors in the dtype they are learned in, free to be changed."""
    return [
        {
            name: factor.detach().to(metric.learning_dtype(group), copy=True).contiguous()
            for name, factor in factors.items()
        }
        for group, factors in zip(metric.groups, metric.factors(), strict=True)
    ]


class Descent:
    """A first-order method of `torch.optim` that changes factors in place, at most one product with `H` a step.

    Heavy ball, `m <- momentum m + clip(grad)`, `F <- F - lr m`, is exactly torch's SGD with momentum.
    """

    def __init__(self, metric: Metric, factors: list[Factors], inner: Inner) -> None:
        self.metric = metric
        self.factors = factors
        self.inner = inner
        flat = [factor for group in factors for factor in group.values()]
        on_cuda = all(factor.is_cuda for factor in flat)
        self.optimizer: torch.optim.Optimizer
        if inner.solver == "adam":
            self.optimizer = torch.optim.Adam(flat, lr=inner.lr, capturable=on_cuda, fused=on_cuda)
        else:
            self.optimizer = torch.optim.SGD(flat, lr=inner.lr, momentum=inner.momentum, fused=on_cuda)
        fuses = inner.compile and inner.solver == "heavy-ball"
        # Of the factors that are stepped here and not by torch.
        self._momenta: list[Factors] = [
            {name: torch.zeros_like(factor) for name, factor in own.items() if fuses and is_fused(group, factor)}
            for group, own in zip(metric.groups, factors, strict=True)
        ]
        self._known = KnownProducts() if inner.product_every > 1 else None
        self._steps = 0

    def restart(self) -> None:
        """Forget the steps so far."""
        self._steps = 0
        if self._known is not None:
            self._known.forget()
        for memory in (*self.optimizer.state.values(), *self._momenta):
            for value in memory.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def step(self, objective: Objective) -> Tensor:
        """One step; returns the objective it started from."""
        here = objective.at(self.factors, self._known)
        self._move(here.slopes())
        return here.value

    def advance(self, objective: Objective) -> None:
        """One step, without working out the objective; with a product with `H` if one is due."""
        (self.multiply if self.inner.multiplies(self._steps) else self.coast)(objective)

    def multiply(self, objective: Objective) -> None:
        """One step with a product."""
        self._move(objective.at(self.factors, self._known).slopes())

    def coast(self, objective: Objective) -> None:
        """One step without a product, from those before it."""
        assert self._known is not None
        self._move(objective.about(self.factors, self._known).slopes())

    def _move(self, slopes: list[Factors]) -> None:
        """A step along these gradients, which are overwritten. Entries that are not finite count as zero."""
        inner = self.inner
        self._steps += 1
        for own, momenta, slope in zip(self.factors, self._momenta, slopes, strict=True):
            for name, momentum in momenta.items():
                descend(own[name], momentum, slope[name], inner.clip, inner.lr, inner.momentum)
        rest = [
            {name: entries for name, entries in slope.items() if name not in momenta}
            for momenta, slope in zip(self._momenta, slopes, strict=True)
        ]
        if not any(rest):
            return
        for part in rest:
            for entries in part.values():
                entries.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for own, clipped in zip(self.factors, clip(self.metric.groups, rest, inner.clip), strict=True):
            for name, entries in clipped.items():
                own[name].grad = entries
        self.optimizer.step()
        self.optimizer.zero_grad()  # so that they do not lie beside the activations during the next product


def _line_search(metric: Metric, factors: list[Factors], inner: Inner) -> Solver:
    return LineSearch(metric, factors, inner.momentum, inner.clip)


def _conjugate_gradients(metric: Metric, factors: list[Factors], inner: Inner) -> Solver:
    return ConjugateGradients(metric, factors, inner.momentum, inner.clip)


SOLVERS: dict[str, Callable[[Metric, list[Factors], Inner], Solver]] = {
    "heavy-ball": Descent,
    "adam": Descent,
    "line-search": _line_search,
    "cg": _conjugate_gradients,
}
