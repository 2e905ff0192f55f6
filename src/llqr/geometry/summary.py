"""What a geometry has learned, in a sentence and a small table."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from llqr.refresh.effect import WEAK, Effect, percent

#: Layers in the table, from both ends.
SHOWN = 4
#: A change below this is explained by what the moving average remembers, if that is more than a quarter.
SMALL, REMEMBERED = 0.1, 0.25


def weak_metric(change: float, structures: set[str]) -> str:
    """The sentence about a metric that does nearly nothing."""
    advice = "try a larger inner lr, more frequent refreshes, or a smaller ema"
    if structures <= {"diagonal", "scalar", "identity", "diag-kfac"}:
        advice = "try structure='e-kfac', or solver='pcg' with several gradients"
    return f"U changes a gradient by {percent(change)}: it does nearly nothing; {advice}"


def summarise(
    effect: Effect | None, layers: Mapping[str, Effect], structures: set[str], refreshes: int, identity: float = 0.0
) -> str:
    """A sentence about the whole gradient, and the layers that are changed most and least.

    `identity` is the share that the identity still has in the moving average.
    """
    kinds = ", ".join(sorted(structures))
    if effect is None:
        return f"U is the identity: no refresh has been accepted yet (structure: {kinds})."
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
    known = {layer or "(model)": own for layer, own in layers.items() if not isnan(own.change)}
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
