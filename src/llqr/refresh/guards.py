"""What is checked before learned factors become the metric, and what makes a refresh be rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

import torch

from llqr.curvature.quadratic import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.refresh.inner_loop import Solution

#: An objective may rise by this share of its own terms before a refresh counts as failed: near the minimum, rounding
#: alone decides whether it rises, and that is no reason to reject a refresh. The size of the slack is a choice.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Findings:
    """The numbers of one refresh: `J` before and after, the loss, `|g|`, `g.Ug`, and whether all factors are finite."""

    before: float = nan
    after: float = nan
    loss: float = nan
    gradient_norm: float = nan
    along: float = nan
    finite: float = nan


def examine(metric: Metric, quadratic: QuadraticModel, solution: Solution, candidate: Sequence[Factors]) -> Findings:
    """Everything the guards check, in one transfer from the device."""
    g = quadratic.gradient
    Ug = metric.apply(g, candidate)
    along = [(g[name].double() * Ug[name].double()).sum() for name in g]
    squares = [part.double().square().sum() for part in g.values()]
    finite = [torch.isfinite(factor).all() for group in candidate for factor in group.values()]
    loss = quadratic.loss.double()
    numbers = torch.stack(
        [
            solution.before.to(loss.device),
            solution.after.to(loss.device),
            loss,
            torch.stack(squares).sum().sqrt(),
            torch.stack(along).sum(),
            torch.stack([loss.new_ones(()).bool(), *finite]).all().double(),
        ]
    )
    return Findings(*numbers.tolist())


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
