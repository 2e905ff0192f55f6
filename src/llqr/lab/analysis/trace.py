"""The trace of the Hessian, estimated from products with random vectors."""

from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from llqr.lab.analysis.sharpness import LossSurface


@dataclass(frozen=True)
class Trace:
    """``error`` is the standard error of ``value``, from the spread of the estimates."""

    value: float
    error: float
    products: int


def hessian_trace(surface: LossSurface, *, products: int = 32, seed: int = 0) -> Trace:
    """Hutchinson's estimate: the mean of `v.Hv` over vectors of random signs."""
    generator = torch.Generator().manual_seed(seed)
    weights = surface.weights
    estimates = []
    for _ in range(products):
        signs = torch.randint(2, weights.shape, generator=generator).mul_(2).sub_(1).to(weights)
        estimates.append(torch.dot(signs.double(), surface.hessian(signs).double()).item())
    return Trace(fmean(estimates), stdev(estimates) / products**0.5, products)
