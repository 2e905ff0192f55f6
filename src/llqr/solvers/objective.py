"""The relaxed LQR objective as a function of the factors of `U`.

With `delta = -U g` the objective is `J(U) = g.delta + 1/2 delta.H delta + 1/2 damping |delta|^2`. Its gradient in `U g`
is the residual `r = (H + damping) U g - g`, and pulling `r` back through `U -> U g` gives the gradient of every factor.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llqr.curvature import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.metric.packed import Packed, dot
from llqr.metric.structure import Pull, Structure
from llqr.solvers.extrapolate import KnownProducts

#: What the factors' matrix products may run in: float16 is too narrow for gradients.
PRECISIONS = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Evaluation:
    """What one product with `H` tells of `J` at some factors; nothing else is computed until asked for."""

    g: Packed
    moved: Packed
    residual: Packed
    pulls: list[Pull]

    @property
    def value(self) -> Tensor:
        """`J = 1/2 (r - g).U g`, because `r + g` is the quadratic part applied to `U g`."""
        return 0.5 * (dot(self.residual, self.moved) - dot(self.g, self.moved))

    def slopes(self) -> list[Factors]:
        """The gradient of `J` in every factor, in the dtype the products ran in."""
        return [pull(r) for pull, r in zip(self.pulls, self.residual, strict=True)]


class Objective:
    """`J` at the gradient and the curvature of one batch.

    Args:
        damping: weight of `1/2 |delta|^2`.
        precision: what structures with matrix products compute `U g` and its pull-back in (default: the factors'
            dtype). What is held, factors and vectors, keeps its own, and `J` adds up in float64.
    """

    def __init__(
        self, metric: Metric, curvature: QuadraticModel, damping: float, precision: torch.dtype | None = None
    ) -> None:
        if precision not in (None, *PRECISIONS):
            names = ", ".join(map(str, PRECISIONS))
            raise ValueError(f"precision: the factors' products run in one of {names}, got {precision}")
        self.metric = metric
        self.curvature = curvature
        self.damping = damping
        self.precision = precision
        self.g: Packed = metric.pack(curvature.gradient)
        curvature.gradient = metric.unpack(self.g, curvature.gradient)  # where it can be a view, held only once
        self._operands = [self._lowered(group, part) for group, part in zip(metric.groups, self.g, strict=True)]

    @property
    def exact(self) -> Objective:
        """The same objective with products in the factors' own precision."""
        if self.precision is None:
            return self
        exact = copy.copy(self)
        exact.precision, exact._operands = None, self.g
        return exact

    def at(self, factors: Sequence[Factors], known: KnownProducts | None = None) -> Evaluation:
        """One product with `H`, which joins those that are known."""
        moved, pulls = self._trace(factors)
        bent = self._bend(moved)
        if known is not None:
            known.remember(moved, bent)
        return self._evaluation(moved, bent, pulls)

    def about(self, factors: Sequence[Factors], known: KnownProducts) -> Evaluation:
        """No product with `H`, but what follows from those that are known."""
        moved, pulls = self._trace(factors)
        return self._evaluation(moved, known.product(moved), pulls)

    def _evaluation(self, moved: Packed, bent: Packed, pulls: list[Pull]) -> Evaluation:
        torch._foreach_sub_(bent, self.g)
        return Evaluation(self.g, moved, bent, pulls)

    def along(self, factors: Sequence[Factors], direction: Sequence[Factors]) -> tuple[Packed, Packed]:
        """How `U g` and `r` change, each linearly, when those factors that are in `direction` move along it.

        One product with `H`. In every group `U` must be linear in what moves, the other factors standing still.
        """
        moved, _ = self._trace([own | step for own, step in zip(factors, direction, strict=True)])
        moved = [part if step else torch.zeros_like(part) for part, step in zip(moved, direction, strict=True)]
        return moved, self._bend(moved)

    def slopes(self, factors: Sequence[Factors], residual: Packed) -> list[Factors]:
        """The gradient of `J` in every factor, from a residual that is known: no product with `H`."""
        _, pulls = self._trace(factors)
        return [pull(r) for pull, r in zip(pulls, residual, strict=True)]

    def _trace(self, factors: Sequence[Factors]) -> tuple[Packed, list[Pull]]:
        """`U g` in the dtype of `g`, and the way back."""
        moved: Packed = []
        pulls: list[Pull] = []
        for group, own, operand, g in zip(self.metric.groups, factors, self._operands, self.g, strict=True):
            lowered = {name: self._lowered(group, factor) for name, factor in own.items()}
            part, pull = group.trace(lowered, operand)
            moved.append(part.to(g.dtype))
            pulls.append(partial(self._pull, group, pull))
        return moved, pulls

    def _pull(self, group: Structure, pull: Pull, r: Tensor) -> Factors:
        return pull(self._lowered(group, r))

    def _lowered(self, group: Structure, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision) if self.precision is not None and group.multiplies else tensor

    def _bend(self, moved: Packed) -> Packed:
        """`(H + damping) U g`."""
        bent = self.metric.pack(self.curvature.product(self.metric.unpack(moved, self.curvature.gradient)))
        if self.damping:
            torch._foreach_add_(bent, moved, alpha=self.damping)
        return bent
