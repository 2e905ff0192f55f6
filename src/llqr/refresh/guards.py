"""What is checked before learned factors become the metric, and what makes a refresh be rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt

import torch
from torch import Tensor

from llqr.curvature.quadratic import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.metric.structure import flattened
from llqr.refresh.effect import Effect, by_layer, inner_products
from llqr.refresh.inner_loop import Solution

#: An objective may rise by this share of its own terms before a refresh counts as failed: near the minimum, rounding
#: alone decides whether it rises, and that is no reason to reject a refresh. The size of the slack is a choice.
ROUNDING = 1e-3
#: `J` is at least `-g.Ug` where the curvature is not negative.
BOTTOMLESS = 2.0


@dataclass(frozen=True)
class Findings:
    """The numbers of one refresh.

    Attributes:
        before, after: `J` at the start and at the end.
        along: `g.Ug`, for the metric as it would become.
        slope: the mean of `g.Ug` over the gradients, for what the inner loop has learned.
        finite: whether all factors are.
        effect, layers: what that metric does to the inner gradient, and to each layer's part of it.
    """

    before: float = nan
    after: float = nan
    loss: float = nan
    finite: bool = False
    gradient_norm: float = nan
    along: float = nan
    slope: float = nan
    effect: Effect = field(default_factory=Effect)
    layers: Mapping[str, Effect] = field(default_factory=dict)

    @property
    def bottomless(self) -> bool:
        """Whether the curvature along `-Ug` is so negative that `J` falls faster than the slope alone lets it.

        The factor is a choice: where curvature is small, rounding alone may make it a little negative.
        """
        return self.after < -BOTTOMLESS * abs(self.slope)


def examine(metric: Metric, quadratic: QuadraticModel, solution: Solution, candidate: Sequence[Factors]) -> Findings:
    """Everything the guards check, in one transfer from the device; the same numbers on all ranks."""
    g = quadratic.gradient
    names, products = metric.placement.listed(list(g), inner_products(g, metric.apply(g, candidate)))
    loss = quadratic.loss.double()
    factors = flattened(candidate)
    # A sum of magnitudes is finite if all entries are: in float64 it does not overflow.
    sums = [loss.new_zeros(()), *(torch._foreach_norm(factors, 1, torch.float64) if factors else ())]
    broken = (~torch.isfinite(torch.stack([total.to(loss) for total in sums]))).sum().to(loss)
    numbers = [
        solution.before.to(loss.device),
        solution.after.to(loss.device),
        loss,
        metric.placement.total(broken),
        _slope(metric, quadratic, solution).to(loss),
    ]
    before, after, value, broken_factors, slope, *rest = torch.cat(
        [torch.stack(numbers), products.flatten().to(loss.device)]
    ).tolist()
    rows = [rest[i : i + 3] for i in range(0, len(rest), 3)]
    gg, gUg, UgUg = (sum(column) for column in zip(*rows, strict=True))
    return Findings(
        before,
        after,
        value,
        broken_factors == 0,
        sqrt(gg) if gg >= 0 else nan,
        gUg,
        slope,
        Effect.of(gg, gUg, UgUg),
        by_layer(names, rows),
    )


def _slope(metric: Metric, quadratic: QuadraticModel, solution: Solution) -> Tensor:
    def along(g: Mapping[str, Tensor]) -> Tensor:
        Ug = metric.apply(g, solution.factors)
        return metric.dot(list(g.values()), [Ug[name] for name in g])

    return torch.stack([along(g) for g in quadratic.gradients or (quadratic.gradient,)]).mean()


def objection(found: Findings) -> str:
    """Why a refresh must be rejected; empty if it need not."""
    if not (isfinite(found.loss) and isfinite(found.gradient_norm)):
        return "the loss or its gradient is not finite"
    if not (found.finite and isfinite(found.after)):
        return "the inner loop gave factors or an objective that are not finite"
    if found.after - found.before > ROUNDING * max(abs(found.before), abs(found.along)):
        return f"the objective rose from {found.before:.6g} to {found.after:.6g}"
    if not found.along > 0 and found.gradient_norm > 0:
        return f"g.Ug = {found.along:.6g} is not positive"
    return ""
