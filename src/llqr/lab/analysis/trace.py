"""The trace of the Hessian, estimated from products with random vectors."""

from statistics import fmean, stdev

import torch

from llqr.lab.analysis.sharpness import LossSurface


def hessian_trace(surface: LossSurface, *, products: int, seed: int = 0) -> dict[str, float]:
    """Hutchinson's estimate, the mean of `v.Hv` over vectors of random signs, and its standard error."""
    generator = torch.Generator().manual_seed(seed)
    weights = surface.weights
    estimates = []
    for _ in range(products):
        signs = torch.randint(2, weights.shape, generator=generator).mul_(2).sub_(1).to(weights)
        estimates.append(torch.dot(signs.double(), surface.hessian(signs).double()).item())
    return {"value": fmean(estimates), "error": stdev(estimates) / products**0.5, "products": products}
