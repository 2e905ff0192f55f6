"""The inner loop: minimise the relaxed LQR objective over the factors of `U`.

With `delta = -U g` the objective is `J(U) = g.delta + 1/2 delta.H delta + 1/2 damping |delta|^2`. Its gradient in
`delta` is the residual `r = g + H delta + damping delta`, and pulling `-r` back through `U -> U g` gives the gradient
of every factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .curvature import QuadraticModel
from .metric import Factors, Metric
from .metric.metric import Packed


@dataclass(frozen=True)
class Inner:
    """Settings of the inner loop.

    Attributes:
        solver: "heavy-ball" (the paper's), "adam", or "cg" where the objective is quadratic in the factors.
        steps: products with `H` before the last objective is read.
        lr: step size of heavy ball and adam.
        momentum: of the heavy ball, zero at every refresh.
        clip: bound on the norm of each factor's gradient (of each layer's for diagonal and scalar).
        damping: weight of `1/2 |delta|^2` in the objective.

    Example:
        >>> Inner("cg", steps=10)
        Inner(solver='cg', steps=10, lr=0.001, momentum=0.9, clip=5.0, damping=0.0)
    """

    solver: str = "heavy-ball"
    steps: int = 50
    lr: float = 1e-3
    momentum: float = 0.9
    clip: float = 5.0
    damping: float = 0.0

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"solver: unknown {self.solver!r}; choose one of {', '.join(SOLVERS)}")
        for name, lower in (("steps", 1), ("lr", 0), ("momentum", 0), ("clip", 0), ("damping", 0)):
            if not getattr(self, name) >= lower:
                raise ValueError(f"{name}: expected a number >= {lower}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Solution:
    """Factors after the inner loop, and the objective at its start and end (device scalars, not yet read)."""

    factors: list[Factors]
    before: Tensor
    after: Tensor


class Objective:
    """`J` and its gradient as functions of the factors."""

    def __init__(self, metric: Metric, curvature: QuadraticModel, damping: float) -> None:
        self.metric = metric
        self.curvature = curvature
        self.damping = damping
        self.g: Packed = metric.pack(curvature.gradient)

    def value(self, factors: Sequence[Factors]) -> tuple[Tensor, Packed]:
        """`J` and the packed residual `r`."""
        delta = [-part for part in self._apply(factors)]
        residual = [g + bent for g, bent in zip(self.g, self._bend(delta), strict=True)]
        # J = 1/2 (g + r).delta, because r - g is the quadratic part applied to delta.
        both = [g + r for g, r in zip(self.g, residual, strict=True)]
        return 0.5 * _dot(both, delta), residual

    def slope(self, factors: Sequence[Factors], residual: Packed) -> list[Factors]:
        """The gradient of `J` in every factor."""
        rows = zip(self.metric.groups, factors, self.g, residual, strict=True)
        return [group.pull_back(f, g, -r) for group, f, g, r in rows]

    def bend(self, direction: Sequence[Factors]) -> list[Factors]:
        """The Hessian of `J` in the factors times a direction, where `U` is linear in its factors."""
        applied = zip(direction, self._apply(direction), strict=True)
        moved = [part if factors else torch.zeros_like(part) for factors, part in applied]
        return self.slope(direction, [-part for part in self._bend(moved)])

    def _apply(self, factors: Sequence[Factors]) -> Packed:
        return [group.apply(f, g) for group, f, g in zip(self.metric.groups, factors, self.g, strict=True)]

    def _bend(self, delta: Packed) -> Packed:
        """`H delta + damping delta`."""
        product = self.metric.pack(self.curvature.product(self.metric.unpack(delta, self.curvature.gradient)))
        if not self.damping:
            return product
        return [bent + self.damping * part for bent, part in zip(product, delta, strict=True)]


def solve(metric: Metric, curvature: QuadraticModel, inner: Inner) -> Solution:
    """Run the inner loop from the metric's current factors; the metric itself is not changed."""
    objective = Objective(metric, curvature, inner.damping)
    start = working_copy(metric)
    if not any(start):  # the identity throughout: nothing to learn
        value, _ = objective.value(start)
        return Solution(start, value, value)
    before, factors = SOLVERS[inner.solver](objective, start, inner)
    after, _ = objective.value(factors)
    return Solution(factors, before, after)


def working_copy(metric: Metric) -> list[Factors]:
    """The metric's factors in the dtype they are learned in, free to be changed."""
    return [
        {name: factor.detach().to(metric.learning_dtype(group), copy=True) for name, factor in factors.items()}
        for group, factors in zip(metric.groups, metric.factors(), strict=True)
    ]


class Descent:
    """A first-order method of `torch.optim` that changes factors in place, one product with `H` a step.

    Heavy ball, `m <- momentum m + clip(grad)`, `F <- F - lr m`, is exactly torch's SGD with momentum.
    """

    def __init__(self, metric: Metric, factors: list[Factors], inner: Inner) -> None:
        self.metric = metric
        self.factors = factors
        self.clip = inner.clip
        flat = [factor for group in factors for factor in group.values()]
        self.optimizer: torch.optim.Optimizer
        if inner.solver == "adam":
            self.optimizer = torch.optim.Adam(flat, lr=inner.lr, capturable=flat[0].is_cuda)
        else:
            self.optimizer = torch.optim.SGD(flat, lr=inner.lr, momentum=inner.momentum)

    def step(self, objective: Objective) -> Tensor:
        """One step; returns the objective it started from."""
        value, residual = objective.value(self.factors)
        slopes = objective.slope(self.factors, residual)
        for group, own, slope in zip(self.metric.groups, self.factors, slopes, strict=True):
            finite = {name: part.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for name, part in slope.items()}
            for name, part in group.clip(finite, self.clip).items():
                own[name].grad = part
        self.optimizer.step()
        return value


def _descend(objective: Objective, factors: list[Factors], inner: Inner) -> tuple[Tensor, list[Factors]]:
    descent = Descent(objective.metric, factors, inner)
    before = descent.step(objective)
    for _ in range(inner.steps - 1):
        descent.step(objective)
    for group in factors:
        for factor in group.values():
            factor.grad = None
    return before, factors


def _conjugate_gradients(objective: Objective, factors: list[Factors], inner: Inner) -> tuple[Tensor, list[Factors]]:
    """Minimise the quadratic `J` over the factors; stops at the minimum or at a direction of negative curvature."""
    if not objective.metric.linear:
        curved = sorted({group.name for group in objective.metric.groups if not group.linear})
        raise ValueError(f"solver: 'cg' needs an objective quadratic in the factors, which {', '.join(curved)} is not")
    before, r = objective.value(factors)
    residual = _scaled(objective.slope(factors, r), -1.0)
    direction = residual
    size = start = _inner_product(residual, residual)
    for _ in range(inner.steps - 1):
        if size <= start * torch.finfo(start.dtype).eps ** 2 or size == 0:
            break
        bent = objective.bend(direction)
        along = _inner_product(direction, bent)
        if not along > 0:
            break
        alpha = size / along
        factors = _sum(factors, direction, alpha)
        residual = _sum(residual, bent, -alpha)
        shrunk = _inner_product(residual, residual)
        direction = _sum(residual, direction, shrunk / size)
        size = shrunk
    return before, factors


SOLVERS = {"heavy-ball": _descend, "adam": _descend, "cg": _conjugate_gradients}


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """In double precision where it adds up, whatever the terms are in."""
    home = a[0].device
    return torch.stack([(x * y).sum(dtype=torch.float64).to(home) for x, y in zip(a, b, strict=True)]).sum()


def _inner_product(a: list[Factors], b: list[Factors]) -> Tensor:
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x]
    return _dot([x for x, _ in pairs], [y for _, y in pairs])


def _sum(a: list[Factors], b: list[Factors], weight: Tensor) -> list[Factors]:
    return [{n: x[n] + weight.to(x[n].dtype) * y[n] for n in x} for x, y in zip(a, b, strict=True)]


def _scaled(a: list[Factors], weight: float) -> list[Factors]:
    return [{name: weight * factor for name, factor in group.items()} for group in a]
