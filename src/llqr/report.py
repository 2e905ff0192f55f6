"""What a refresh found and costs: whether its numbers are acceptable, and what `U` does to a gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llqr.caller_warnings import warn
from llqr.metric.layout import layer_of
from llqr.metric.structure import widened
from llqr.schedule import Schedule, at

if TYPE_CHECKING:
    from llqr.inner import Solution
    from llqr.metric import Factors, Metric

#: An objective may rise by this share of its own terms before a refresh counts as failed: near the minimum, rounding
#: alone decides whether it rises, and that is no reason to reject a refresh. The size of the slack is a choice.
ROUNDING = 1e-3
#: A metric that changes a gradient by less than this does nearly nothing.
WEAK = 0.01
#: Layers in the table of a summary, from both ends.
SHOWN = 4


class RefreshError(RuntimeError):
    """Too many refreshes in a row were rejected."""


class RefreshWarning(UserWarning):
    """A refresh was rejected, is approximate, changes next to nothing, or learns from a loss that looks wrong."""


@dataclass(frozen=True)
class Refresh:
    """What happened in one refresh; `reason` says why the old metric was kept, and is empty when it was not.

    Attributes:
        step: the optimizer step it came before.
        objective_before, objective_after: `J` at the start and at the end of the inner loop.
        loss, gradient_norm: on the inner batch.
        change: `|Ug - g| / |g|` on the inner gradient, for the metric that the refresh leads to.
        cosine: of the angle between `g` and `Ug`.
        gain: `|Ug| / |g|`.
        engine: what multiplied by `H`.
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
    objective_before: float = nan
    objective_after: float = nan
    loss: float = nan
    gradient_norm: float = nan
    change: float = nan
    cosine: float = nan
    gain: float = nan
    engine: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Effect:
    """What `U` does to one layer's part of a gradient: `change`, `cosine` and `gain` as in `Refresh`."""

    change: float = nan
    cosine: float = nan
    gain: float = nan

    @classmethod
    def of(cls, products: Sequence[Sequence[float]]) -> Effect:
        """From the inner products `g.g`, `g.Ug` and `Ug.Ug` of some parameters."""
        gg, gUg, UgUg = (sum(column) for column in zip(*products, strict=True))
        if not gg > 0:
            return cls()
        change = sqrt(max(UgUg - 2 * gUg + gg, 0.0) / gg)  # in this order NaN stays NaN
        cosine = gUg / sqrt(gg * UgUg) if UgUg > 0 else nan
        return cls(change, cosine, sqrt(UgUg / gg))


def examine(
    metric: Metric, solution: Solution, candidate: Sequence[Factors], step: int
) -> tuple[Refresh, dict[str, Effect]]:
    """Everything the guards check, in one transfer from the device; the same numbers on all ranks.

    Returns the report of a refresh that leads to the factors `candidate`, and what these do to every layer.
    """
    g, loss = solution.gradient, solution.loss.double()
    names, products = metric.placement.listed(list(g), _inner_products(g, metric.apply(g, candidate)))
    factors = [factor for own in candidate for factor in own.values()]
    # A sum of magnitudes is finite if all entries are: in float64 it does not overflow.
    sums = [loss.new_zeros(()), *(torch._foreach_norm(factors, 1, torch.float64) if factors else ())]
    broken = (~torch.isfinite(torch.stack([total.to(loss) for total in sums]))).sum().to(loss)
    numbers = [solution.before.to(loss), solution.after.to(loss), loss, metric.placement.total(broken)]
    found = torch.cat([torch.stack(numbers), products.flatten().to(loss)])
    before, after, value, broken_factors, *rest = found.tolist()
    rows = [rest[i : i + 3] for i in range(0, len(rest), 3)]
    square, along = sum(row[0] for row in rows), sum(row[1] for row in rows)
    if not (isfinite(value) and isfinite(square)):
        reason = "the loss or its gradient is not finite"
    elif broken_factors or not isfinite(after):
        reason = "the inner loop gave factors or an objective that are not finite"
    elif after - before > ROUNDING * max(abs(before), abs(along)):
        reason = f"the objective rose from {before:.6g} to {after:.6g}"
    elif not along > 0 and square > 0:
        reason = f"g.Ug = {along:.6g} is not positive"
    else:
        reason = ""
    of_layers: dict[str, list[list[float]]] = {}
    for name, row in zip(names, rows, strict=True):
        of_layers.setdefault(layer_of(name), []).append(row)
    whole, norm = Effect.of(rows), sqrt(square) if square >= 0 else nan
    report = Refresh(step, not reason, reason, before, after, value, norm, whole.change, whole.cosine, whole.gain)
    return report, {layer: Effect.of(own) for layer, own in of_layers.items()}


def _inner_products(g: Mapping[str, Tensor], Ug: Mapping[str, Tensor]) -> Tensor:
    """`g.g`, `g.Ug` and `Ug.Ug` of every parameter, on the device: `(parameters, 3)`, in float64."""

    def squares(tensors: Sequence[Tensor]) -> Tensor:
        norms = torch._foreach_norm(list(tensors), 2, torch.float64)
        return torch.stack([norm.to(norms[0].device) for norm in norms]).square()

    before, after = ([own[name].to(widened(own[name].dtype)) for name in g] for own in (g, Ug))
    gg, UgUg, moved = squares(before), squares(after), squares(torch._foreach_sub(after, before))
    return torch.stack([gg, (gg + UgUg - moved) / 2, UgUg], 1)


# -- before a training -------------------------------------------------------------------------------------------------


def costs(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The seconds of each run, and its peak of memory where the device tells it."""
    found: dict[str, float] = {}
    cuda = device.type == "cuda"
    for name, run in runs.items():
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(device)
            found[f"{name}_bytes"] = torch.cuda.max_memory_allocated(device) - before
        found[f"{name}_seconds"] = time.perf_counter() - started
    return found


def warn_if_short(steps: int, every: Schedule, ema: float) -> None:
    """Of a training with fewer refreshes than its moving average spans: `1 / (1 - ema)`, 20 for 0.95."""
    refreshes = step = 0
    while step < steps:
        refreshes, step = refreshes + 1, step + max(1, round(at(every, step, "every", 0)))
    if refreshes * (1 - ema) < 1 - 1e-9:
        warn(
            f"steps: {steps} have {refreshes} refreshes, which move U by {percent(1 - ema**refreshes)} of the way "
            f"(ema {ema:g}); refresh more often, or pass inner=llqr.Inner(product_every=3, debias=True)",
            RefreshWarning,
        )


# -- in words ----------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """Two significant digits for a small share, whole numbers for a large one."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def advice(change: float) -> str:
    """What to do about a metric that does nearly nothing; empty for one that does more."""
    sentence = (
        f"U changes a gradient by {percent(change)}: it does nearly nothing; try more frequent refreshes, a smaller "
        "ema, a larger inner lr, llqr.Inner(product_every=3, debias=True), or structure='e-kfac' if it is another one"
    )
    return sentence if change < WEAK else ""


def summarise(last: Refresh | None, layers: Mapping[str, Effect], refreshes: int) -> str:
    """A sentence about the whole gradient, and the layers that `U` changes most and least."""
    if last is None:
        return "U is the identity: no refresh has been accepted yet."
    if isnan(last.change):
        return "The last inner gradient was zero: U has no effect to measure."
    sentence = advice(last.change) or (
        f"U changes a gradient by {percent(last.change)} (cosine {last.cosine:.2f}, {last.gain:.2g} times its length) "
        f"after {refreshes} refresh{'es' * (refreshes != 1)}"
    )
    # A model that is one layer has no name for it.
    known = {layer or "(model)": own for layer, own in layers.items() if not isnan(own.change)}
    width = max(map(len, ("layer", *known)))
    order = sorted(known.items(), key=lambda item: item[1].change, reverse=True)
    table = [f"{name:<{width}}  {own.change:6.3f}  {own.cosine:6.3f}  {own.gain:5.2f}" for name, own in order]
    if len(table) > 2 * SHOWN:
        table[SHOWN:-SHOWN] = ["..."]
    return "\n".join([f"{sentence}.", f"{'layer':<{width}}  change  cosine   gain", *table])
