"""What `U` does to a gradient: how much it changes it, and in which direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt

import torch
from torch import Tensor

from llqr.metric.layout import layer_of

#: A metric that changes a gradient by less than this does nearly nothing.
WEAK = 0.01


@dataclass(frozen=True)
class Effect:
    """The effect of `U` on a gradient `g`, or on one layer's part of it.

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


def inner_products(g: Mapping[str, Tensor], Ug: Mapping[str, Tensor]) -> Tensor:
    """`g.g`, `g.Ug` and `Ug.Ug` of every parameter, on the device: `(parameters, 3)`, in float64."""
    before, after = ([_widened(vectors[name]) for name in g] for vectors in (g, Ug))
    gg, UgUg, moved = map(_squares, (before, after, list(torch._foreach_sub(after, before))))
    return torch.stack([gg, (gg + UgUg - moved) / 2, UgUg], 1)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _squares(tensors: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(tensors, 2, torch.float64)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square()


def by_layer(names: Sequence[str], products: Sequence[Sequence[float]]) -> dict[str, Effect]:
    """The effect on every layer, from the inner products of its parameters."""
    sums: dict[str, list[float]] = {}
    for name, row in zip(names, products, strict=True):
        own = sums.setdefault(layer_of(name), [0.0, 0.0, 0.0])
        for i, value in enumerate(row):
            own[i] += value
    return {layer: Effect.of(*own) for layer, own in sums.items()}


def percent(share: float) -> str:
    """Two significant digits for a small share, whole numbers for a large one."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
