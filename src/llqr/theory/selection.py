"""Selection between wells: the regenerative model of Appendix B, its bound, and its simulation.

A cycle picks a well, starts at its centre and lasts until `|e| >= R`. Locally `e <- a e + sigma xi` with standard
normal `xi`: a flat well has `a = 1` (no restoring force, no ejection), a sharp unstable one `a > 1` (SAM's kick
ejects).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llqr.theory.arguments import Array, at_least, positive


def occupation(nu: npt.ArrayLike, mean_exit_times: npt.ArrayLike) -> Array:
    """Renewal-reward: the long-run fraction of time in each well, `nu_m E[tau_m] / sum_l nu_l E[tau_l]`."""
    time = positive("nu", nu) * positive("mean_exit_times", mean_exit_times)
    return np.asarray(time / time.sum())


def flat_exit_lower_bound(sigma: npt.ArrayLike, R: npt.ArrayLike) -> Array:
    """`E[tau] >= R^2 / sigma^2` (c_flat = 1): by optional stopping, `sigma^2 E[tau] = E[e_tau^2] >= R^2`."""
    return (positive("R", R) / positive("sigma", sigma)) ** 2


def sharp_exit_upper_bound(sigma: float, R: float, growth: float) -> float:
    """`E[tau] <= sum_n min(1, sqrt(2 / pi) R / s_n)`, which is `O(1 + log(R / sigma))`, `s_n` the deviation of `e_n`.

    `tau > n` needs `|e_n| < R`, and a centred normal `e_n` has density at most `1 / (sqrt(2 pi) s_n)`.
    """
    positive("sigma", sigma)
    positive("R", R)
    if growth <= 1:
        raise ValueError(f"growth must exceed 1 for an unstable well, got {growth!r}.")
    # s_n grows like growth^n; this many terms go far beyond the last one that matters in double precision.
    terms = int(np.ceil((np.log(R / sigma) + 40) / np.log(growth))) + 1
    n = np.arange(1, max(terms, 2))
    log_deviation = np.log(sigma) + 0.5 * (np.log(np.expm1(2 * n * np.log(growth))) - np.log(growth**2 - 1))
    return float(1 + np.minimum(1.0, np.sqrt(2 / np.pi) * R * np.exp(-log_deviation)).sum())


def simulate_exit_times(
    growth: npt.ArrayLike, sigma: float, R: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Simulated exit times, one visit per entry of `growth`."""
    a = at_least("growth", growth, 1.0).ravel()
    positive("sigma", sigma)
    positive("R", R)
    e = np.zeros(a.shape)
    times = np.zeros(a.shape, dtype=np.int64)
    inside = np.arange(a.size)
    step = 0
    while inside.size:
        step += 1
        e = a[inside] * e + sigma * rng.standard_normal(inside.size)
        out = np.abs(e) >= R
        times[inside[out]] = step
        inside, e = inside[~out], e[~out]
    return times


@dataclass(frozen=True)
class Selection:
    """Occupation of the sharp wells at noise scales `sigma`: simulated, by renewal-reward, and its upper bound."""

    sigma: Array
    simulated: Array
    bound: Array
    flat_time: Array
    sharp_time: Array
    R: float

    @property
    def rate(self) -> Array:
        """`sigma^2 log(R / sigma) / R^2`, the proposition's rate."""
        return (self.sigma / self.R) ** 2 * np.log(self.R / self.sigma)

    @property
    def slope_in_rate(self) -> float:
        """Slope of `log(occupation)` against the log of the proposition's rate; at least 1 by the proposition."""
        return _slope(np.log(self.rate), np.log(self.simulated))

    @property
    def slope_in_sigma(self) -> float:
        """Slope against `log sigma`: 2, minus the effect of the logarithm."""
        return _slope(np.log(self.sigma), np.log(self.simulated))


def select(
    sigma: npt.ArrayLike,
    *,
    R: float = 1.0,
    growth: float = 1.5,
    sharp_fraction: float = 0.5,
    cycles: int = 8000,
    seed: int = 0,
) -> Selection:
    """Run `cycles` cycles at each noise scale; a cycle picks a sharp well with probability `sharp_fraction`."""
    scales = positive("sigma", sigma).ravel()
    if not 0 < sharp_fraction < 1:
        raise ValueError(f"sharp_fraction must lie strictly between 0 and 1, got {sharp_fraction!r}.")
    rng = np.random.default_rng(seed)
    columns = []
    for scale in scales:
        sharp = rng.random(cycles) < sharp_fraction
        times = simulate_exit_times(np.where(sharp, growth, 1.0), float(scale), R, rng)
        most = sharp_fraction * sharp_exit_upper_bound(float(scale), R, growth)
        least = (1 - sharp_fraction) * float(flat_exit_lower_bound(scale, R))
        share = times[sharp].sum() / times.sum()
        columns.append((share, most / (most + least), times[~sharp].mean(), times[sharp].mean()))
    simulated, bound, flat_time, sharp_time = np.array(columns, dtype=np.float64).T
    return Selection(scales, simulated, bound, flat_time, sharp_time, R)


def _slope(x: Array, y: Array) -> float:
    return float(np.polyfit(x, y, 1)[0])
