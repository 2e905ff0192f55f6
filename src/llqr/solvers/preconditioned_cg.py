"""The exact minimiser for structures that scale entries (scalar, diagonal): preconditioned conjugate gradients.

There `U g = u * g`, and `J` is quadratic in the factors `u`: `A u = b` with `b = mean_k g_k^2` and
`A u = mean_k g_k * (H + damping)(u * g_k)`, both summed over a layer for a scalar. `diag(b)` is the preconditioner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.metric import Factors, Metric
from llqr.metric.packed import Packed
from llqr.metric.structure import flattened
from llqr.solvers.objective import Objective
from llqr.solvers.solver import Solver, SolverSettings


class PreconditionedCG(Solver):
    """Conjugate gradients (Polak-Ribiere) from the current factors times their best multiple.

    One product with `H` per step and gradient; the first step evaluates `J`, and gives the best multiple for free.
    Nothing is read from the device, and all memory stays in place, so that every step can be captured. Along a
    direction without positive curvature the step has length zero.
    """

    name = "pcg"
    capturable = True
    tracks_residual = True

    def __init__(self, metric: Metric, factors: list[Factors], settings: SolverSettings) -> None:
        super().__init__(metric, factors, settings)
        self._u = flattened(factors)
        self._weights, self._slopes, self._direction = ([torch.zeros_like(u) for u in self._u] for _ in range(3))
        self._size = torch.zeros((), dtype=torch.float64, device=self._u[0].device)
        self._residual: Packed = []

    @classmethod
    def objection(cls, metric: Metric) -> str:
        other = sorted({group.name for group in metric.whole.groups if group.shapes() and not group.scales_entries})
        kind = "'pcg' is for structures that scale entries (scalar, diagonal)"
        return f"{kind}, which {', '.join(other)} does not" if other else ""

    def restart(self) -> None:
        for tensor in (*self._slopes, *self._direction, self._size):
            tensor.zero_()

    def step(self, objective: Objective) -> Tensor:
        """The first step: evaluate `J`, move to the best multiple of the factors, and set up the preconditioner."""
        here = objective.at(self.factors)
        before = here.value
        linear, quadratic = objective.dot(objective.g, here.Ug), objective.dot(here.residual, here.Ug)
        quadratic = quadratic + linear
        multiple = torch.where((linear > 0) & (quadratic > 0), linear / quadratic, 1.0)
        torch._foreach_mul_(self._u, [multiple.to(u) for u in self._u])
        for residual, g in zip(here.residual, objective.g, strict=True):
            residual.mul_(multiple.to(g)).addcmul_(g, (multiple - 1).to(g))
        if not self._residual:
            self._residual = [torch.empty_like(part) for part in here.residual]
        torch._foreach_copy_(self._residual, here.residual)
        torch._foreach_copy_(self._weights, flattened(objective.pulled(here.pulls, objective.g)))
        return before

    def value(self, objective: Objective) -> Tensor:
        return objective.value(self.factors, self._residual)

    def advance(self, objective: Objective) -> None:
        dot = self.metric.dot
        slopes = flattened(objective.slopes(self.factors, self._residual))
        steepest = [torch.where(b > 0, slope / b, 0.0) for slope, b in zip(slopes, self._weights, strict=True)]
        size = dot(slopes, steepest)
        share = torch.where(self._size > 0, (size - dot(self._slopes, steepest)) / self._size, 0.0).clamp_min(0.0)
        for direction, way in zip(self._direction, steepest, strict=True):
            direction.mul_(share.to(direction)).sub_(way)
        torch._foreach_copy_(self._slopes, slopes)
        self._size.copy_(size)
        self._move(objective, slopes)

    def _move(self, objective: Objective, slopes: list[Tensor]) -> None:
        """To the lowest point of `J` along the direction, with the residual there."""
        directions = iter(self._direction)
        Ug, HUg = objective.along(self.factors, [{name: next(directions) for name in own} for own in self.factors])
        fall, curvature = -self.metric.dot(slopes, self._direction), objective.dot(Ug, HUg)
        length = torch.where(curvature > 0, fall / curvature, 0.0)
        for u, direction in zip(self._u, self._direction, strict=True):
            u.addcmul_(direction, length.to(u))
        for residual, part in zip(self._residual, HUg, strict=True):
            residual.addcmul_(part, length.to(part))
