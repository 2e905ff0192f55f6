"""The relaxed LQR objective as a function of the factors of `U`.

With `delta = -U g` the objective is `J(U) = g.delta + 1/2 delta.H delta + 1/2 damping |delta|^2`. Its gradient in `U g`
is the residual `r = (H + damping) U g - g`, and pulling `r` back through `U -> U g` gives the gradient of every factor.

With several gradients `g_1 ... g_K` of shares of the batch the objective is the mean over them, with the same `H`: one
gradient is noisy, and a diagonal that fits it reproduces `(H^-1 g)_i / g_i` of one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from llqr.cuda_graphs import Branches
from llqr.curvature.quadratic import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.metric.packed import Packed
from llqr.metric.structure import Pull, Structure
from llqr.solvers.damping import Damping
from llqr.solvers.extrapolation import Extrapolation

T = TypeVar("T")
#: What is done with a group's slopes as soon as they are known: given its place, it returns those that are left to do.
Then = Callable[[int, Factors], Factors]

#: What the factors' matrix products may run in: float16 is too narrow for gradients.
PRECISIONS = (torch.bfloat16, torch.float32, torch.float64)
#: A group with so many entries in its factors keeps a device busy, and beside others it would only take more memory.
LARGE = 2**25


@dataclass(frozen=True)
class Evaluation:
    """`J` at some factors, from one product with `H` per gradient; value and slopes are computed when asked for."""

    objective: Objective
    Ug: Packed
    residual: Packed
    pulls: list[Pull]

    @property
    def value(self) -> Tensor:
        """`J = 1/2 (r - g).U g`, because `r + g` is the quadratic part applied to `U g`."""
        dot = self.objective.dot
        return 0.5 * (dot(self.residual, self.Ug) - dot(self.objective.g, self.Ug))

    def slopes(self, then: Then | None = None) -> list[Factors]:
        """The gradient of `J` in every factor, in the dtype the products ran in."""
        return self.objective.pulled(self.pulls, self.residual, then)


class Objective:
    """`J` for the gradients and the curvature of one batch.

    Vectors are in the metric's packed layout: one tensor per group, and for several gradients one such list after the
    other.

    Args:
        quadratic: loss, gradients and products. Its gradients are copied into the packed layout; `self.quadratic` is
            the same model with views of that copy, so that whoever goes on with it lets the first copy be freed.
        damping: weight of `1/2 |delta|^2`.
        precision: what structures with matrix products compute `U g` and its pull-back in (default: the factors'
            dtype). Factors and vectors are held in their own dtype, and `J` is summed in float64.
        branches: of a CUDA graph, in which groups are computed side by side.
    """

    def __init__(
        self,
        metric: Metric,
        quadratic: QuadraticModel,
        damping: float | Damping = 0.0,
        precision: torch.dtype | None = None,
        branches: Branches | None = None,
    ) -> None:
        if precision not in (None, *PRECISIONS):
            names = ", ".join(map(str, PRECISIONS))
            raise ValueError(f"precision: the factors' products run in one of {names}, got {precision}")
        self.metric = metric
        self.precision = precision
        self._branches = branches
        given = quadratic.gradients or (quadratic.gradient,)
        self.count = len(given)
        packed = [metric.pack(gradient) for gradient in given]
        self.g: Packed = [part for own in packed for part in own]
        views = [metric.unpack(own, quadratic.gradient) for own in packed]
        several = len(views) > 1
        self.quadratic = QuadraticModel(
            quadratic.loss,
            quadratic.gradient if several else views[0],
            quadratic.product,
            tuple(views) if several else (),
            products=quadratic.products if several else None,
        )
        groups = list(metric.groups) * self.count  # that of every packed tensor
        self._operands = [self._lowered(group, part) for group, part in zip(groups, self.g, strict=True)]
        self._damping: float | Tensor = self._resolved(damping if isinstance(damping, Damping) else Damping(damping))

    def _resolved(self, damping: Damping) -> float | Tensor:
        """`lambda`; a share is taken of `|g.Hg| / (g.g)`, which a Newton curvature may make negative."""
        if not damping.relative:
            return damping.value
        g = self.quadratic.gradient
        Hg = self.quadratic.product(g)
        parts = list(g.values())
        along, square = self.metric.dot(parts, [Hg[name] for name in g]), self.metric.dot(parts, parts)
        return damping.value * torch.where(square > 0, along.abs() / square, 0.0)

    def dot(self, a: Packed, b: Packed) -> Tensor:
        """The inner product, as a mean over the gradients."""
        total = self.metric.dot(a, b)
        return total if self.count == 1 else total / self.count

    @property
    def exact(self) -> Objective:
        """The same objective with products in the factors' own precision."""
        if self.precision is None:
            return self
        exact = copy.copy(self)
        exact.precision, exact._operands = None, self.g
        return exact

    def at(self, factors: Sequence[Factors], products: Extrapolation | None = None) -> Evaluation:
        """With one product with `H` per gradient, which `products` remembers."""
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
        return Evaluation(self, Ug, HUg, pulls)

    def along(self, factors: Sequence[Factors], direction: Sequence[Factors]) -> tuple[Packed, Packed]:
        """How `U g` and `r` change, each linearly, when those factors that are in `direction` move along it.

        One product with `H` per gradient. In every group `U` must be linear in what moves while the other factors stay.
        """
        Ug, _ = self._trace([own | step for own, step in zip(factors, direction, strict=True)])
        steps = list(direction) * self.count
        Ug = [part if step else torch.zeros_like(part) for part, step in zip(Ug, steps, strict=True)]
        return Ug, self._multiply(Ug)

    def value(self, factors: Sequence[Factors], residual: Packed) -> Tensor:
        """`J`, from a known residual: no product with `H`."""
        Ug, pulls = self._trace(factors)
        return Evaluation(self, Ug, residual, pulls).value

    def slopes(self, factors: Sequence[Factors], residual: Packed) -> list[Factors]:
        """The gradient of `J` in every factor, from a known residual: no product with `H`."""
        _, pulls = self._trace(factors)
        return self.pulled(pulls, residual)

    def pulled(self, pulls: list[Pull], residual: Packed, then: Then | None = None) -> list[Factors]:
        """The gradient of every factor, as a mean over the gradients `g_k`."""
        groups = range(len(self.metric.groups))
        return self.side_by_side([partial(self._pulled, i, pulls, residual, then) for i in groups])

    def _pulled(self, i: int, pulls: list[Pull], residual: Packed, then: Then | None) -> Factors:
        (first, r), *others = zip(self._of_group(i, pulls), self._of_group(i, residual), strict=True)
        total = first(r)
        for pull, r in others:
            more = pull(r)
            total = {name: slope + more[name] for name, slope in total.items()}
        if others:
            total = {name: slope / self.count for name, slope in total.items()}
        return total if then is None else then(i, total)

    def _trace(self, factors: Sequence[Factors]) -> tuple[Packed, list[Pull]]:
        """`U g` in the dtype of `g`, and the way back."""
        traced = self.side_by_side([partial(self._traced, i, own) for i, own in enumerate(factors)])
        in_order = [part for shares in zip(*traced, strict=True) for part in shares]
        return [Ug for Ug, _ in in_order], [pull for _, pull in in_order]

    def _traced(self, i: int, own: Factors) -> list[tuple[Tensor, Pull]]:
        group = self.metric.groups[i]
        lowered = {name: self._lowered(group, factor) for name, factor in own.items()}
        traced: list[tuple[Tensor, Pull]] = []
        for operand, g in zip(self._of_group(i, self._operands), self._of_group(i, self.g), strict=True):
            part, pull = group.trace(lowered, operand)
            traced.append((part.to(g.dtype), partial(self._pull, group, pull)))
        return traced

    def _of_group(self, i: int, packed: Sequence[T]) -> Sequence[T]:
        """One for each gradient."""
        return packed[i :: len(self.metric.groups)]

    def side_by_side(self, each: Sequence[Callable[[], T]]) -> list[T]:
        """What these functions return, one per group."""
        if self._branches is None:
            return [compute() for compute in each]
        return self._branches.run(each, [group.stored() for group in self.metric.groups], LARGE)

    def _pull(self, group: Structure, pull: Pull, r: Tensor) -> Factors:
        return pull(self._lowered(group, r))

    def _lowered(self, group: Structure, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision) if self.precision is not None and group.multiplies else tensor

    def _multiply(self, Ug: Packed) -> Packed:
        """`(H + damping) U g`."""
        model, groups = self.quadratic, len(self.metric.groups)
        shares = [Ug[start : start + groups] for start in range(0, len(Ug), groups)]
        products = model.multiplied([self.metric.unpack(share, model.gradient) for share in shares])
        HUg: Packed = [part for Hv in products for part in self.metric.pack(Hv)]
        if isinstance(self._damping, Tensor):
            for part, own in zip(HUg, Ug, strict=True):
                part.addcmul_(own, self._damping.to(part))
        elif self._damping:
            torch._foreach_add_(HUg, Ug, alpha=self._damping)
        return HUg
