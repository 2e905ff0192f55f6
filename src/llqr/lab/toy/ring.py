"""The two toy figures: escape from inside the sharp well, and ejection from its bottom by gradient noise.

Both use one landscape (a flat bowl with a sharp ring, `RingLandscape`), one learning rate for all four methods and one
radius for the two SAM methods. `FIGURE_CONSTANTS` holds the constants, found by `docs/figures/toy_search.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.theory.landscapes import Number, Pothole
from llqr.theory.trajectories import METHODS, Method, Trajectory, simulate

NOISE_VARIANCE = 1e-9
SAM_METHODS: tuple[Method, ...] = ("sam", "llqr+sam")


@dataclass(frozen=True)
class RingLandscape:
    """`L = 1/2 theta.H_bar theta + well(|theta| - radius)` in the plane, with `H_bar = diag(curvature)`.

    The flat basin is the bottom of the bowl at the origin, the sharp one an annular well; `curvature=(a, a)` gives the
    isotropic landscape, two different values the anisotropic variant.
    """

    curvature: tuple[Number, Number]
    well: Pothole
    radius: float = 5.0
    flat_radius: float = 1.0
    """An iterate has reached the flat basin once it is this close to the origin."""

    def loss(self, theta: Tensor) -> Tensor:
        bowl = 0.5 * (self.average_curvature(theta) * theta**2).sum(-1)
        return bowl + self.well.loss(torch.linalg.vector_norm(theta, dim=-1) - self.radius)

    def metric(self, gradient: Tensor) -> Tensor:
        """`U g` with `U = H_bar^-1`."""
        return gradient / self.average_curvature(gradient)

    def average_curvature(self, like: Tensor) -> Tensor:
        first, second = (torch.as_tensor(value, dtype=like.dtype) for value in self.curvature)
        return torch.stack(torch.broadcast_tensors(first, second), dim=-1)

    def in_well(self, theta: Tensor) -> Tensor:
        inside: Tensor = (torch.linalg.vector_norm(theta, dim=-1) - self.radius).abs() < self.well.radius
        return inside

    def in_flat_basin(self, theta: Tensor) -> Tensor:
        near: Tensor = torch.linalg.vector_norm(theta, dim=-1) < self.flat_radius
        return near

    def along_ray(self, r: Tensor, angle: Number = 0.0) -> Tensor:
        """The one-dimensional slice: the loss at distance `r` from the origin in the direction `angle`."""
        return self.loss(r.unsqueeze(-1) * _direction(angle, r.dtype))

    def bottom(self, angle: Number = 0.0) -> Tensor:
        """The lowest point of the well on the ray at `angle` (radians), by bisection of the radial slope."""
        direction = _direction(angle, torch.float64)
        bowl = (self.average_curvature(direction) * direction**2).sum(-1)
        wall = bowl * (self.radius - self.well.core) < self.well.wall_slope
        if not bool(torch.as_tensor(wall).all()):
            raise ValueError("the well has no minimum: its walls must be steeper than the bowl at that radius.")
        low, high = bowl * 0 + self.radius - self.well.core, bowl * 0 + self.radius
        for _ in range(80):
            middle = 0.5 * (low + high)
            rising = bowl * middle + self.well.slope(middle - self.radius) > 0
            low, high = torch.where(rising, low, middle), torch.where(rising, middle, high)
        return (0.5 * (low + high)).unsqueeze(-1) * direction


def _direction(angle: Number, dtype: torch.dtype) -> Tensor:
    angle = torch.as_tensor(angle, dtype=dtype)
    return torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1)


@dataclass(frozen=True)
class ToyConstants:
    """The constants of the toy figures. Any field but `lr` may hold one value per row of the simulation."""

    lambda_bar: Number
    sharpness: Number
    well_radius: Number
    hardening: Number
    edge: Number
    rho: Number
    lr: float
    anisotropy: Number = 1.0
    """`lambda_bar` of the second axis over that of the first."""

    @property
    def landscape(self) -> RingLandscape:
        well = Pothole(self.sharpness, self.well_radius, self.hardening, self.edge)
        return RingLandscape((self.lambda_bar, self.anisotropy * self.lambda_bar), well)


@dataclass(frozen=True)
class ToyRuns:
    """The trajectories of all four methods from the same starts, under the same noise if there is any."""

    constants: ToyConstants
    trajectories: Mapping[Method, Trajectory]

    @property
    def landscape(self) -> RingLandscape:
        return self.constants.landscape

    def losses(self, method: Method) -> Tensor:
        """Loss above the flat minimum, `(steps + 1, rows)`."""
        flat = self.landscape.loss(torch.zeros_like(self.trajectories[method].positions[0]))
        return self.trajectories[method].losses(self.landscape.loss) - flat

    def stays(self, method: Method) -> Tensor:
        """Rows that never leave the sharp well."""
        return self.trajectories[method].first(lambda points: ~self.landscape.in_well(points)) < 0

    def flat_step(self, method: Method) -> Tensor:
        """Per row, the step at which the iterate first enters the flat basin; -1 if it never does."""
        return self.trajectories[method].first(self.landscape.in_flat_basin)

    def path_to_flat(self, method: Method) -> Tensor:
        """Per row, the path length until the flat basin is first entered (the whole path where it never is)."""
        return self.trajectories[method].path_length(self.flat_step(method))

    def escape_claims(self) -> dict[str, Tensor]:
        """The claims of the first figure, row by row."""
        slow, fast = (self.flat_step(method) for method in SAM_METHODS)  # -1: never
        decay = {method: self.losses(method).mean(0) for method in SAM_METHODS}
        return {
            "SGD and LLQR stay in the sharp well": self.stays("sgd") & self.stays("llqr"),
            "SAM and LLQR+SAM leave it": ~self.stays("sam") & ~self.stays("llqr+sam"),
            "LLQR+SAM reaches the flat basin first": (fast >= 0) & ((slow < 0) | (fast < slow)),
            "LLQR+SAM's mean loss over the run is lower": decay["llqr+sam"] < decay["sam"],
        }

    def ejection_claims(self) -> dict[str, Tensor]:
        """The claims of the second figure, row by row."""
        return {
            "SGD and LLQR stay in the sharp well": self.stays("sgd") & self.stays("llqr"),
            "SAM and LLQR+SAM reach the flat basin": (self.flat_step("sam") > 0) & (self.flat_step("llqr+sam") > 0),
            "LLQR+SAM's path there is at most half of SAM's": self.path_to_flat("llqr+sam")
            <= 0.5 * self.path_to_flat("sam"),
        }


FIGURE_CONSTANTS = ToyConstants(
    lambda_bar=0.565, sharpness=29.3, well_radius=0.407, hardening=3.3, edge=0.123, rho=0.0977, lr=0.02
)
"""The constants of both figures, a finalist of `docs/figures/toy_search.py`."""


def escape(constants: ToyConstants = FIGURE_CONSTANTS, starts: int = 32, steps: int = 1200) -> ToyRuns:
    """The first figure: `starts` points inside the sharp well but off its bottom, no noise."""
    return run(constants, off_bottom_starts(constants, starts), steps)


def ejection(constants: ToyConstants = FIGURE_CONSTANTS, seeds: int = 32, steps: int = 1200) -> ToyRuns:
    """The second figure: from the well's bottom, `seeds` noise schedules, each shared by the four methods."""
    start = constants.landscape.bottom(torch.full((seeds,), 0.8, dtype=torch.float64))
    return run(constants, start, steps, shared_noise(seeds, steps))


def off_bottom_starts(constants: ToyConstants, starts: int, repeats: int = 1) -> Tensor:
    """Points around the ring, off its bottom by 5% to 20% of the core's half-width, on either side.

    `repeats` repeats the same `starts` points, for constants that have one value per row.
    """
    angles = (torch.arange(starts, dtype=torch.float64) + 0.5) * (2 * math.pi / starts)  # none of them on an axis
    bottom = constants.landscape.bottom(angles.repeat(repeats))
    generator = torch.Generator().manual_seed(0)
    offset = 0.05 + 0.15 * torch.rand(starts, generator=generator, dtype=torch.float64)
    side = 1 - 2 * (torch.arange(starts) % 2)
    outward = bottom / torch.linalg.vector_norm(bottom, dim=-1, keepdim=True)
    points: Tensor = bottom + ((side * offset).repeat(repeats) * constants.landscape.well.core).unsqueeze(-1) * outward
    return points


def shared_noise(seeds: int, steps: int) -> Tensor:
    """Gaussian schedules `(steps, seeds, 2)`; column `s` is seeded by `s` and does not depend on `seeds`."""
    columns = [
        torch.randn(steps, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in range(seeds)
    ]
    return math.sqrt(NOISE_VARIANCE) * torch.stack(columns, dim=1)


def run(constants: ToyConstants, start: Tensor, steps: int, noise: Tensor | None = None) -> ToyRuns:
    """All four methods from `start`, each by the library's own optimizer."""
    loss, metric = constants.landscape.loss, constants.landscape.metric
    drawn = None if noise is None else noise.__getitem__
    runs: dict[Method, Trajectory] = {}
    for method in METHODS:
        rho = constants.rho if method in SAM_METHODS else None
        runs[method] = simulate(method, loss, start, lr=constants.lr, steps=steps, rho=rho, metric=metric, noise=drawn)
    return ToyRuns(constants, runs)
