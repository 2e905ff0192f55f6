"""Solvers that use that `J` is quadratic along their path: exact line search, and conjugate gradients.

`U g` is linear in the factors of `Structure.linear_in`, so that along a direction in them one product with `H` gives
the whole parabola: its lowest point, and the residual there. Structures with several such sets (K-FAC is linear in
either of its sides) take them in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from llqr.metric import Factors, Metric
from llqr.metric.clipping import clip
from llqr.metric.packed import Packed
from llqr.solvers.objective import Objective
from llqr.solvers.solver import Solver, SolverSettings


class LineSearch(Solver):
    """The heavy ball's direction, `m <- momentum m + clip(grad)`, with the step that minimises `J` along it.

    One product with `H` per step; the first step only evaluates `J`. Nothing is read from the device: along a direction
    without positive curvature the step has length zero, and the loop goes on.
    """

    name = "line-search"
    #: Steps in one set of factors before the next set has its turn.
    sweep: ClassVar[int] = 1

    def __init__(self, metric: Metric, factors: list[Factors], settings: SolverSettings) -> None:
        super().__init__(metric, factors, settings)
        self._steps = 0
        self._sets = max((len(group.linear_in) for group in metric.whole.groups), default=0)
        self._residual: Packed = []
        self._value = torch.zeros(())
        self._memory: list[Factors] = [{} for _ in factors]

    @classmethod
    def objection(cls, metric: Metric) -> str:
        curved = sorted({group.name for group in metric.whole.groups if group.shapes() and not group.linear_in})
        need = f"{cls.name!r} needs an objective that is quadratic in some of the factors"
        return f"{need}, which that of {', '.join(curved)} is not" if curved else ""

    def step(self, objective: Objective) -> Tensor:
        if not self._residual:
            start = objective.at(self.factors)
            self._residual, self._value = start.residual, start.value
            return self._value
        before = self._value
        turn, place = divmod(self._steps, self.sweep)
        slopes = self._slopes(objective, turn)
        direction = self._direction(slopes, first=place == 0 and self._sets > 1)
        self._move(objective, slopes, direction)
        self._steps += 1
        return before

    def _slopes(self, objective: Objective, turn: int) -> list[Factors]:
        """The gradients of the factors whose turn it is."""
        found = objective.slopes(self.factors, self._residual)
        chosen = []
        for group, own, slopes in zip(self.metric.groups, self.factors, found, strict=True):
            names = group.linear_in[turn % len(group.linear_in)] if group.linear_in else ()
            chosen.append({name: slopes[name].to(own[name].dtype) for name in names})
        return chosen

    def _direction(self, slopes: list[Factors], first: bool) -> list[Factors]:
        clipped = clip(self.metric.groups, slopes, self.settings.clip)
        for memory, own in zip(self._memory, clipped, strict=True):
            for name, slope in own.items():
                memory[name] = slope if name not in memory else memory[name].mul_(self.settings.momentum).add_(slope)
        rows = zip(self._memory, clipped, strict=True)
        return [{name: -memory[name] for name in own} for memory, own in rows]

    def _move(self, objective: Objective, slopes: list[Factors], direction: list[Factors]) -> None:
        """To the lowest point of `J` along the direction, with the residual and the value there."""
        Ug, HUg = objective.along(self.factors, direction)
        fall, curvature = -self._dot(slopes, direction), objective.dot(Ug, HUg)
        length = torch.where(curvature > 0, fall / curvature, 0.0)
        for own, step in zip(self.factors, direction, strict=True):
            for name, part in step.items():
                own[name].addcmul_(part, length.to(part))
        for residual, part in zip(self._residual, HUg, strict=True):
            residual.addcmul_(part, length.to(part))
        self._value = self._value - length * fall + 0.5 * length.square() * curvature

    def _dot(self, a: Sequence[Factors], b: Sequence[Factors]) -> Tensor:
        pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x]
        return self.metric.dot([x for x, _ in pairs], [y for _, y in pairs])


class ConjugateGradients(LineSearch):
    """Directions conjugate to one another (Polak-Ribiere, which tolerates inexact products)."""

    name = "cg"
    sweep = 4
    _last: tuple[list[Factors], list[Factors], Tensor] | None = None

    def _direction(self, slopes: list[Factors], first: bool) -> list[Factors]:
        size = self._dot(slopes, slopes)
        if self._last is None or first:
            direction = [{name: -slope for name, slope in own.items()} for own in slopes]
        else:
            old, direction, old_size = self._last
            share = ((size - self._dot(slopes, old)) / old_size).clamp_min(0.0)
            share = torch.where(old_size > 0, share, 0.0)
            for way, own in zip(direction, slopes, strict=True):
                for name, slope in own.items():
                    way[name].mul_(share.to(slope)).sub_(slope)
        self._last = slopes, direction, size
        return direction
