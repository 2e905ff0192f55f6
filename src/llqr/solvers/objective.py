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

from llqr.curvature.quadratic import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.metric.packed import Packed, dot
from llqr.metric.structure import Pull, Structure
from llqr.solvers.extrapolation import Extrapolation

#: What the factors' matrix products may run in: float16 is too narrow for gradients.
PRECISIONS = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Evaluation:
    """`J` at some factors, from one product with `H`; the value and the slopes are computed when asked for."""

    g: Packed
    Ug: Packed
    residual: Packed
    pulls: list[Pull]

    @property
    def value(self) -> Tensor:
        """`J = 1/2 (r - g).U g`, because `r + g` is the quadratic part applied to `U g`."""
        return 0.5 * (dot(self.residual, self.Ug) - dot(self.g, self.Ug))

    def slopes(self) -> list[Factors]:
        """The gradient of `J` in every factor, in the dtype the products ran in."""
        return [pull(r) for pull, r in zip(self.pulls, self.residual, strict=True)]


class Objective:
    """`J` for the gradient and the curvature of one batch.

    Args:
        quadratic: loss, gradient and products. Its gradient is copied into the packed layout; `self.quadratic` is the
            same model with views of that copy, so that whoever goes on with it lets the first copy be freed.
        damping: weight of `1/2 |delta|^2`.
        precision: what structures with matrix products compute `U g` and its pull-back in (default: the factors'
            dtype). Factors and vectors are held in their own dtype, and `J` is summed in float64.
    """

    def __init__(
        self, metric: Metric, quadratic: QuadraticModel, damping: float = 0.0, precision: torch.dtype | None = None
    ) -> None:
        if precision not in (None, *PRECISIONS):
            names = ", ".join(map(str, PRECISIONS))
            raise ValueError(f"precision: the factors' products run in one of {names}, got {precision}")
        self.metric = metric
        self.damping = damping
        self.precision = precision
        self.g: Packed = metric.pack(quadratic.gradient)
        self.quadratic = QuadraticModel(quadratic.loss, metric.unpack(self.g, quadratic.gradient), quadratic.product)
        self._operands = [self._lowered(group, part) for group, part in zip(metric.groups, self.g, strict=True)]

    @property
    def exact(self) -> Objective:
        """The same objective with products in the factors' own precision."""
        if self.precision is None:
            return self
        exact = copy.copy(self)
        exact.precision, exact._operands = None, self.g
        return exact

    def at(self, factors: Sequence[Factors], products: Extrapolation | None = None) -> Evaluation:
        """With one product with `H`, which `products` remembers."""
        Ug, pulls = self._trace(factors)
        HUg = self._multiply(Ug)
        if products is not None:
            products.remember(Ug, HUg)
        return self._evaluation(Ug, HUg, pulls)

    def extrapolated(self, factors: Sequence[Factors], products: Extrapolation) -> Evaluation:
        """Without a product with `H`: from those that are remembered."""
        Ug, pulls = self._trace(factors)
        return self._evaluation(Ug, products.product(Ug), pulls)

    def _evaluation(self, Ug: Packed, HUg: Packed, pulls: list[Pull]) -> Evaluation:
        """Turns `HUg` into the residual, in place."""
        torch._foreach_sub_(HUg, self.g)
        return Evaluation(self.g, Ug, HUg, pulls)

    def along(self, factors: Sequence[Factors], direction: Sequence[Factors]) -> tuple[Packed, Packed]:
        """How `U g` and `r` change, each linearly, when those factors that are in `direction` move along it.

        One product with `H`. In every group `U` must be linear in what moves while the other factors stay.
        """
        Ug, _ = self._trace([own | step for own, step in zip(factors, direction, strict=True)])
        Ug = [part if step else torch.zeros_like(part) for part, step in zip(Ug, direction, strict=True)]
        return Ug, self._multiply(Ug)

    def slopes(self, factors: Sequence[Factors], residual: Packed) -> list[Factors]:
        """The gradient of `J` in every factor, from a known residual: no product with `H`."""
        _, pulls = self._trace(factors)
        return [pull(r) for pull, r in zip(pulls, residual, strict=True)]

    def _trace(self, factors: Sequence[Factors]) -> tuple[Packed, list[Pull]]:
        """`U g` in the dtype of `g`, and the way back."""
        Ug: Packed = []
        pulls: list[Pull] = []
        for group, own, operand, g in zip(self.metric.groups, factors, self._operands, self.g, strict=True):
            lowered = {name: self._lowered(group, factor) for name, factor in own.items()}
            part, pull = group.trace(lowered, operand)
            Ug.append(part.to(g.dtype))
            pulls.append(partial(self._pull, group, pull))
        return Ug, pulls

    def _pull(self, group: Structure, pull: Pull, r: Tensor) -> Factors:
        return pull(self._lowered(group, r))

    def _lowered(self, group: Structure, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision) if self.precision is not None and group.multiplies else tensor

    def _multiply(self, Ug: Packed) -> Packed:
        """`(H + damping) U g`."""
        model = self.quadratic
        HUg = self.metric.pack(model.product(self.metric.unpack(Ug, model.gradient)))
        if self.damping:
            torch._foreach_add_(HUg, Ug, alpha=self.damping)
        return HUg
