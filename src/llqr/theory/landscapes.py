"""Differentiable toy landscapes: a pothole, and a pothole on a slope.

Each landscape has an average geometry, so that `metric` (`U = H_bar^-1` as a map of gradients) is what an infinitely
slow LLQR would learn: the bowl without the well. `loss` maps points `(..., dim)` to `(...)`; the constants may be
tensors with one value per row, so that one call evaluates many landscapes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Number = float | Tensor
"""A constant, or one value per simulated row."""


@dataclass(frozen=True)
class Pothole:
    """A well around `z = 0` that is exactly zero, with zero slope, for `|z| >= radius`.

    Its slope is `sharpness z (1 + hardening (z / radius)^2)` up to `(1 - edge) radius` and falls linearly to zero at
    `radius`. With `hardening = 0` the core is the paper's `1/2 lambda_eps z^2` and `radius` is its `r_eps`; a positive
    `hardening` gives a round bottom with hard walls. The loss is continuously differentiable.
    """

    sharpness: Number
    radius: Number
    hardening: Number = 0.0
    edge: Number = 0.1

    def __post_init__(self) -> None:
        sharpness, radius, hardening, edge = (
            torch.as_tensor(value) for value in (self.sharpness, self.radius, self.hardening, self.edge)
        )
        for name, holds, wanted in (
            ("sharpness", sharpness > 0, "positive"),
            ("radius", radius > 0, "positive"),
            ("hardening", hardening >= 0, "at least 0"),
            ("edge", (edge > 0) & (edge < 1), "between 0 and 1, both excluded"),
        ):
            if not bool(holds.all()):
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}.")

    @property
    def core(self) -> Number:
        """Half-width of the part in which the restoring force grows with the distance."""
        return (1 - self.edge) * self.radius

    @property
    def wall_slope(self) -> Number:
        """The steepest slope, at the rim of the core."""
        return self.sharpness * self.core * (1 + self.hardening * (self.core / self.radius) ** 2)

    @property
    def depth(self) -> Number:
        return self._spring(self.core) + 0.5 * self.wall_slope * (self.radius - self.core)

    def loss(self, z: Tensor) -> Tensor:
        """The well's contribution to the loss: `-depth` at the centre, zero outside."""
        distance = z.abs()
        inside = torch.minimum(distance, torch.as_tensor(self.core, dtype=z.dtype))
        to_rim = (self.radius - distance).clamp(min=0)
        width = self.radius - self.core
        rim = -0.5 * self.wall_slope * to_rim**2 / width
        return torch.where(distance < self.core, self._spring(inside) - self.depth, rim)

    def slope(self, z: Tensor) -> Tensor:
        """Derivative of `loss`."""
        distance = z.abs()
        spring = self.sharpness * distance * (1 + self.hardening * (distance / self.radius) ** 2)
        rim = self.wall_slope * (self.radius - distance).clamp(min=0) / (self.radius - self.core)
        return torch.where(distance < self.core, spring, rim) * z.sign()

    def _spring(self, z: Number) -> Number:
        return self.sharpness * (0.5 * z**2 + 0.25 * self.hardening * z**4 / self.radius**2)


@dataclass(frozen=True)
class PotholeOnSlope:
    """`L = 1/2 lambda_bar x^2 + tilt x + well(x)`: one pothole direction, on a slope that leads out of the well.

    The bowl's own minimum lies at `-tilt / lambda_bar`; inside the core the loss is the paper's quadratic model around
    a minimum moved by `tilt / (lambda_bar + lambda_eps)`. Points have shape `(..., 1)`.
    """

    lambda_bar: Number
    tilt: Number
    well: Pothole

    def loss(self, x: Tensor) -> Tensor:
        x = x.squeeze(-1)
        return 0.5 * self.lambda_bar * x**2 + self.tilt * x + self.well.loss(x)

    def metric(self, gradient: Tensor) -> Tensor:
        return gradient / torch.as_tensor(self.lambda_bar, dtype=gradient.dtype).unsqueeze(-1)

    @property
    def minimum(self) -> Number:
        """The bottom of the well (of the quadratic core; meaningful for `hardening = 0`)."""
        return -self.tilt / (self.lambda_bar + self.well.sharpness)
