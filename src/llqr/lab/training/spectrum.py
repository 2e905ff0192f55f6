"""A summary of the learned metric `U` that is cheap enough to log: the mean eigenvalue of each layer's block."""

from statistics import median

import torch
from torch import Tensor

from llqr import Geometry
from llqr.metric.layout import layer_of


@torch.no_grad()
def layer_means(geometry: Geometry) -> dict[str, float]:
    """`trace(U_l) / n_l` for every layer, by Hutchinson's estimate `v.Uv / n_l` with one vector `v` of random signs.

    Exact for diagonal and scalar metrics, because the square of a sign is 1. The signs are the same every time and come
    from their own generator, so that the summary does not affect a run.
    """
    generator = torch.Generator().manual_seed(0)
    signs = {
        name: (torch.randint(2, p.shape, generator=generator) * 2 - 1).to(p.device, p.dtype)
        for name, p in geometry.parameters.items()
    }
    u_signs = geometry.metric.apply(signs)
    sums: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for name, sign in signs.items():
        layer = layer_of(name)
        along = (sign.double() * u_signs[name].double()).sum()
        sums[layer] = sums[layer] + along if layer in sums else along
        sizes[layer] = sizes.get(layer, 0) + sign.numel()
    totals = torch.stack(list(sums.values())).tolist()
    return {layer: total / sizes[layer] for layer, total in zip(sums, totals, strict=True)}


def summary(geometry: Geometry) -> dict[str, float | str]:
    """The smallest, the median and the largest of the layers' means, and which layers the extremes belong to."""
    means = layer_means(geometry)
    lowest, highest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return {
        "min": means[lowest],
        "median": median(means.values()),
        "max": means[highest],
        "min_layer": lowest,
        "max_layer": highest,
    }
