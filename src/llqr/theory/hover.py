"""Hovering of the real optimizers, compared with the closed forms of `llqr.theory.envelopes`."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llqr.theory.arguments import Array
from llqr.theory.envelopes import perceived_sharpness, two_cycle_amplitude, vanilla_two_cycle_amplitude
from llqr.theory.trajectories import Method, iterate


@dataclass(frozen=True)
class Hovering:
    """Amplitudes of the two-cycle in wells `(lambda_bar, lambda_eps)`: measured, and in closed form."""

    lambda_bar: Array
    lambda_eps: Array
    measured: Array
    predicted: Array

    @property
    def worst_error(self) -> float:
        """Largest relative error."""
        return float(np.abs(self.measured / self.predicted - 1).max())


def hover(
    method: Method,
    lambda_bar: npt.ArrayLike,
    lambda_eps: npt.ArrayLike,
    *,
    eta: float,
    rho: float,
    steps: int = 2000,
    start: float = 1.0,
) -> Hovering:
    """Run `sam` or `llqr+sam` in one-dimensional quadratic wells, one per entry, and measure the final amplitude."""
    bar, eps = (np.ascontiguousarray(a, dtype=np.float64).ravel() for a in np.broadcast_arrays(lambda_bar, lambda_eps))
    if method == "sam":
        predicted = vanilla_two_cycle_amplitude(eta, rho, bar * perceived_sharpness(bar, eps))
    elif method == "llqr+sam":
        predicted = two_cycle_amplitude(eta, rho, bar, eps)
    else:
        raise ValueError(f"method must be 'sam' or 'llqr+sam' to hover, got {method!r}.")
    sharpness = torch.from_numpy(bar + eps)
    metric = torch.from_numpy(bar).unsqueeze(-1)
    points = iterate(
        method,
        lambda z: 0.5 * sharpness * z.squeeze(-1) ** 2,
        torch.full((len(bar), 1), start, dtype=torch.float64),
        lr=eta,
        steps=steps,
        rho=rho,
        metric=lambda gradient: gradient / metric,
    )
    *_, last = points
    return Hovering(bar, eps, last.abs().squeeze(-1).numpy().copy(), predicted)
