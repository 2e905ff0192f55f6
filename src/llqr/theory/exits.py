"""Mean exit times from a pothole under gradient noise, by simulation with the real optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llqr.theory.arguments import Array, positive
from llqr.theory.landscapes import PotholeOnSlope
from llqr.theory.trajectories import Method, iterate

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExitSettings:
    """One pothole on a slope and one learning rate, for SAM and LLQR+SAM alike."""

    lambda_bar: float = 0.25
    lambda_eps: float = 20.0
    r_eps: float = 1.0
    tilt_fraction: float = 0.08
    edge: float = 0.05
    eta: float = 0.005
    steps: int = 2000
    """Runs are cut off here: a mean that includes unfinished visits is a lower bound."""

    @property
    def landscape(self) -> PotholeOnSlope:
        return PotholeOnSlope.tilted(self.lambda_bar, self.lambda_eps, self.r_eps, self.tilt_fraction, self.edge)


@dataclass(frozen=True)
class ExitTimes:
    """Exit times (in steps) at every pair of `rho` and `sigma`: the mean over seeds and the fraction cut off."""

    rho: Array
    sigma: Array
    mean: Array
    cut: Array


def exit_steps(points: Iterator[Tensor], rows: int, radius: float, steps: int, progress: Progress) -> Tensor:
    """The first of ``steps`` steps at which each row is outside the radius; ``steps + 1`` where it never is."""
    times = torch.full((rows,), steps + 1)
    for step, x in enumerate(points, start=1):
        out = x.squeeze(-1).abs() > radius
        times = torch.where(out, times.clamp(max=step), times)
        if step % 100 == 0:
            progress(step, steps)
            if bool((times <= step).all()):
                break
    progress(steps, steps)
    return times


def exit_times(
    method: Method,
    rho: npt.ArrayLike,
    sigma: npt.ArrayLike,
    *,
    seeds: int = 64,
    settings: ExitSettings = ExitSettings(),  # noqa: B008 - frozen
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> ExitTimes:
    """Start `seeds` iterates at the bottom of the well for each pair `(rho[i], sigma[i])` and time their exit.

    `sigma` is the standard deviation of the noise in the update gradient, before the metric transports it.
    """
    radii, scales = (
        np.ascontiguousarray(a) for a in np.broadcast_arrays(positive("rho", rho), positive("sigma", sigma))
    )
    cells = radii.size
    landscape = settings.landscape
    deviation = torch.from_numpy(scales.ravel()).repeat_interleave(seeds).unsqueeze(-1)
    generator = torch.Generator().manual_seed(seed)
    start = torch.full((cells * seeds, 1), float(landscape.minimum), dtype=torch.float64)
    points = iterate(
        method,
        landscape.loss,
        start,
        lr=settings.eta,
        steps=settings.steps,
        rho=torch.from_numpy(radii.ravel()).repeat_interleave(seeds),
        metric=landscape.metric,
        noise=lambda step: deviation * torch.randn(cells * seeds, 1, generator=generator, dtype=torch.float64),
    )
    times = exit_steps(points, cells * seeds, settings.r_eps, settings.steps, progress)
    cut = (times > settings.steps).view(cells, seeds).double().mean(1)
    mean = times.clamp(max=settings.steps).view(cells, seeds).double().mean(1)
    return ExitTimes(radii, scales, mean.numpy().reshape(radii.shape), cut.numpy().reshape(radii.shape))
