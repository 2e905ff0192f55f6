"""Slices of the loss surface through a solution: the mean loss along straight lines in the space of the weights."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llqr.lab.analysis.sharpness import LossSurface

POINTS = 21
"""Positions on a line."""


@dataclass(frozen=True)
class Slice:
    """``losses[i]`` is the mean loss at `w + positions[i] * d`; position 0 is the solution.

    ``unit`` says what a position of 1 means.
    """

    direction: str
    unit: str
    positions: list[float]
    losses: list[float]


def along(
    surface: LossSurface, direction: Tensor, name: str, unit: str, *, reach: float = 1.0, points: int = POINTS
) -> Slice:
    """The loss at an odd number of ``points`` from ``-reach`` to ``reach`` times ``direction``."""
    half = points // 2
    positions = [reach * step / half for step in range(-half, half + 1)]
    weights = surface.weights
    return Slice(name, unit, positions, [surface.loss(weights + position * direction) for position in positions])


def along_eigenvector(surface: LossSurface, vector: Tensor, *, reach: float = 1.0, points: int = POINTS) -> Slice:
    """Along the direction of the largest curvature; positions are Euclidean distances."""
    found = along(surface, vector / vector.norm(), "top eigenvector", "distance", reach=reach, points=points)
    # The sign of an eigenvector is arbitrary; with the steeper side always on the right, slices can be overlaid.
    return found if found.losses[-1] >= found.losses[0] else replace(found, losses=found.losses[::-1])


def along_random(surface: LossSurface, seed: int, *, reach: float = 0.5, points: int = POINTS) -> Slice:
    """Along a filter-normalised random direction; a position of 1 moves every filter by its own norm."""
    direction = filter_normalised(surface, seed)
    return along(surface, direction, f"random {seed}", "filter norm", reach=reach, points=points)


def filter_normalised(surface: LossSurface, seed: int) -> Tensor:
    """A Gaussian direction with every filter scaled to the norm of the network's filter, and zero for vectors.

    A filter is a row of a weight matrix or an output channel of a convolution. The scaling makes slices comparable
    between networks whose loss does not change when one layer is scaled up and the next one down (Li et al., 2018,
    "Visualizing the Loss Landscape of Neural Nets"); as there, biases and normalisation scales are not moved.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, parameter in surface.parameters.items():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if parameter.ndim < 2:
            parts[name] = torch.zeros_like(parameter)
            continue
        rows, own = noise.flatten(1), parameter.flatten(1)
        scale = own.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True)
        parts[name] = (rows * scale).view(parameter.shape)
    return surface.flat(parts)
