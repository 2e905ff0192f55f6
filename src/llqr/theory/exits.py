"""Mean exit times from a pothole under gradient noise, by simulation with the real optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llqr.theory.arguments import Array, positive
from llqr.theory.phase import PhaseSettings, Progress, exit_steps
from llqr.theory.trajectories import Method


@dataclass(frozen=True)
class ExitSettings(PhaseSettings):
    """One pothole on a slope and one learning rate, for SAM and LLQR+SAM alike."""

    lambda_eps: float = 20.0
    eta: float = 0.005
    steps: int = 2000
    """Runs are cut off here: a mean that includes unfinished visits is a lower bound."""
    lambda_bar: float = 0.25


@dataclass(frozen=True)
class ExitTimes:
    """Exit times (in steps) at every pair of `rho` and `sigma`: the mean over seeds and the fraction cut off."""

    rho: Array
    sigma: Array
    mean: Array
    cut: Array


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
    landscape = settings.landscape(settings.lambda_bar)
    deviation = torch.from_numpy(scales.ravel()).repeat_interleave(seeds).unsqueeze(-1)
    generator = torch.Generator().manual_seed(seed)
    start = torch.full((cells * seeds, 1), float(landscape.minimum), dtype=torch.float64)
    times = exit_steps(
        method,
        landscape,
        start,
        torch.from_numpy(radii.ravel()).repeat_interleave(seeds),
        settings,
        progress,
        noise=lambda step: deviation * torch.randn(cells * seeds, 1, generator=generator, dtype=torch.float64),
    )
    cut = (times > settings.steps).view(cells, seeds).double().mean(1)
    mean = times.clamp(max=settings.steps).view(cells, seeds).double().mean(1)
    return ExitTimes(radii, scales, mean.numpy().reshape(radii.shape), cut.numpy().reshape(radii.shape))
