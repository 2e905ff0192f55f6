"""What a refresh found: its numbers, whether they are acceptable, and what `U` does to a gradient, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llqr.metric.layout import layer_of

if TYPE_CHECKING:
    from llqr.inner import Solution
    from llqr.metric import Factors, Metric

#: An objective may rise by this share of its own terms before a refresh counts as failed: near the minimum, rounding
#: alone decides whether it rises, and that is no reason to reject a refresh. The size of the slack is a choice.
ROUNDING = 1e-3
#: `J` is at least `-g.Ug` where the curvature is not negative. The factor is a choice: where curvature is small,
#: rounding alone may make it a little negative.
BOTTOMLESS = 2.0
#: A metric that changes a gradient by less than this does nearly nothing.
WEAK = 0.01
#: Layers in the table of a summary, from both ends.
SHOWN = 4
#: A change below this is explained by what the moving average remembers, if that is more than a quarter.
SMALL, REMEMBERED = 0.1, 0.25


class RefreshError(RuntimeError):
    """Too many refreshes in a row were rejected."""


class RefreshWarning(UserWarning):
    """A refresh was rejected, or computed with an approximate engine."""


@dataclass(frozen=True)
class Refresh:
    """What happened in one refresh; `reason` says why the old metric was kept, and is empty when it was not.

    Attributes:
        step: the optimizer step it came before.
        objective_before, objective_after: `J` at the start and at the end of the inner loop.
        loss, gradient_norm: on the inner batch.
        change: `|Ug - g| / |g|` on the inner gradient, for the metric that the refresh leads to.
        cosine: of the angle between `g` and `Ug`.
        seconds: what the host spent on it.

    Example:
        >>> import llqr, torch
        >>> geometry = llqr.Geometry(torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy)
        >>> report = geometry.refresh((torch.randn(8, 4), torch.randint(3, (8,))))
        >>> report.accepted, report.reason, report.objective_after < report.objective_before
        (True, '', True)
    """

    step: int
    accepted: bool
    reason: str
    objective_before: float
    objective_after: float
    loss: float
    gradient_norm: float
    change: float
    cosine: float
    engine: str
    seconds: float


@dataclass(frozen=True)
class Effect:
    """What `U` does to a gradient `g`, or to one layer's part of it.

    Attributes:
        change: `|Ug - g| / |g|`.
        cosine: of the angle between `g` and `Ug`.
        gain: `|Ug| / |g|`.
    """

    change: float = nan
    cosine: float = nan
    gain: float = nan

    @classmethod
    def of(cls, gg: float, gUg: float, UgUg: float) -> Effect:
        """From the inner products `g.g`, `g.Ug` and `Ug.Ug`."""
        if not gg > 0:
            return cls()
        change = sqrt(max(0.0, UgUg - 2 * gUg + gg) / gg)
        cosine = gUg / sqrt(gg * UgUg) if UgUg > 0 else nan
        return cls(change, cosine, sqrt(max(0.0, UgUg) / gg))


@dataclass(frozen=True)
class Findings:
    """The numbers of one refresh.

    Attributes:
        before, after: `J` at the start and at the end.
        finite: whether all factors are.
        along: `g.Ug`, for the metric as it would become.
        slope: `g.Ug`, for what the inner loop has learned.
        effect, layers: what the metric, as it would become, does to the inner gradient, and to each layer's part of it.
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
    def objection(self) -> str:
        """Why the refresh must be rejected; empty if it need not."""
        if not (isfinite(self.loss) and isfinite(self.gradient_norm)):
            return "the loss or its gradient is not finite"
        if not (self.finite and isfinite(self.after)):
            return "the inner loop gave factors or an objective that are not finite"
        if self.after - self.before > ROUNDING * max(abs(self.before), abs(self.along)):
            return f"the objective rose from {self.before:.6g} to {self.after:.6g}"
        if not self.along > 0 and self.gradient_norm > 0:
            return f"g.Ug = {self.along:.6g} is not positive"
        return ""

    @property
    def bottomless(self) -> bool:
        """Whether the curvature along `-Ug` is so negative that `J` falls faster than the slope alone lets it."""
        return self.after < -BOTTOMLESS * abs(self.slope)


def examine(metric: Metric, solution: Solution, candidate: Sequence[Factors]) -> Findings:
    """Everything the guards check, in one transfer from the device; the same numbers on all ranks."""
    g, loss = solution.quadratic.gradient, solution.quadratic.loss.double()
    names, products = metric.placement.listed(list(g), _inner_products(g, metric.apply(g, candidate)))
    learned = metric.apply(g, solution.factors)
    factors = [factor for own in candidate for factor in own.values()]
    # A sum of magnitudes is finite if all entries are: in float64 it does not overflow.
    sums = [loss.new_zeros(()), *(torch._foreach_norm(factors, 1, torch.float64) if factors else ())]
    broken = (~torch.isfinite(torch.stack([total.to(loss) for total in sums]))).sum().to(loss)
    numbers = [
        solution.before.to(loss.device),
        solution.after.to(loss.device),
        loss,
        metric.placement.total(broken),
        metric.dot(list(g.values()), [learned[name] for name in g]).to(loss),
    ]
    before, after, value, broken_factors, slope, *rest = torch.cat(
        [torch.stack(numbers), products.flatten().to(loss.device)]
    ).tolist()
    rows = [rest[i : i + 3] for i in range(0, len(rest), 3)]
    gg, gUg, UgUg = _added(rows)
    of_layers: dict[str, list[list[float]]] = {}
    for name, row in zip(names, rows, strict=True):
        of_layers.setdefault(layer_of(name), []).append(row)
    return Findings(
        before=before,
        after=after,
        loss=value,
        finite=broken_factors == 0,
        gradient_norm=sqrt(gg) if gg >= 0 else nan,
        along=gUg,
        slope=slope,
        effect=Effect.of(gg, gUg, UgUg),
        layers={layer: Effect.of(*_added(own)) for layer, own in of_layers.items()},
    )


def _inner_products(g: Mapping[str, Tensor], Ug: Mapping[str, Tensor]) -> Tensor:
    """`g.g`, `g.Ug` and `Ug.Ug` of every parameter, on the device: `(parameters, 3)`, in float64."""

    def widened(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

    def squares(tensors: Sequence[Tensor]) -> Tensor:
        norms = torch._foreach_norm(tensors, 2, torch.float64)
        return torch.stack([norm.to(norms[0].device) for norm in norms]).square()

    before, after = ([widened(vectors[name]) for name in g] for vectors in (g, Ug))
    gg, UgUg, moved = squares(before), squares(after), squares(torch._foreach_sub(after, before))
    return torch.stack([gg, (gg + UgUg - moved) / 2, UgUg], 1)


def _added(rows: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    gg, gUg, UgUg = (sum(column) for column in zip(*rows, strict=True))
    return gg, gUg, UgUg


# -- in words ----------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """Two significant digits for a small share, whole numbers for a large one."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def structures_of(metric: Metric) -> set[str]:
    """The structures of a metric's matrices, or of everything in a network without any."""
    whole = metric.whole
    return {whole.kinds[block.name] for block in whole.blocks if block.is_matrix} or set(whole.kinds.values())


def weak_metric(change: float, structures: set[str]) -> str:
    """The sentence about a metric that does nearly nothing."""
    advice = "try a larger inner lr, more frequent refreshes, or a smaller ema"
    if structures <= {"diagonal", "scalar", "identity", "diag-kfac"}:
        advice = "try structure='e-kfac', or solver='pcg'"
    return f"U changes a gradient by {percent(change)}: it does nearly nothing; {advice}"


def summarise(found: Findings | None, structures: set[str], refreshes: int, identity: float) -> str:
    """A sentence about the whole gradient, and the layers that `U` changes most and least.

    `identity` is the share that the identity still has in the moving average.
    """
    kinds = ", ".join(sorted(structures))
    if found is None:
        return f"U is the identity: no refresh has been accepted yet (structure: {kinds})."
    effect = found.effect
    if isnan(effect.change):
        return f"The last inner gradient was zero: U has no effect to measure (structure: {kinds})."
    if effect.change < WEAK:
        lines = [f"{weak_metric(effect.change, structures)}."]
    else:
        lines = [
            f"U changes a gradient by {percent(effect.change)} (cosine {effect.cosine:.2f}, {effect.gain:.2g} times "
            f"its length) after {refreshes} refresh{'es' * (refreshes != 1)} (structure: {kinds})."
        ]
    if effect.change < SMALL and identity > REMEMBERED:
        lines.append(
            f"{percent(identity)} of the moving average is still the identity it started from; "
            "llqr.Inner(debias=True) forgets that at once."
        )
    # A model that is one layer has no name for it.
    known = {layer or "(model)": own for layer, own in found.layers.items() if not isnan(own.change)}
    order = sorted(known, key=lambda layer: known[layer].change, reverse=True)
    shown = order if len(order) <= 2 * SHOWN else [*order[:SHOWN], "...", *order[-SHOWN:]]
    width = max(len("layer"), *(len(layer) for layer in shown)) if shown else 0
    lines.append(f"{'layer':<{width}}  change  cosine   gain")
    for layer in shown:
        own = known.get(layer)
        lines.append(
            "..." if own is None else f"{layer:<{width}}  {own.change:6.3f}  {own.cosine:6.3f}  {own.gain:5.2f}"
        )
    return "\n".join(lines)
