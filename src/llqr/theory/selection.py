"""Selection between wells: the regenerative model of Appendix B and its bounds.

A cycle picks a well, starts at its centre and lasts until `|e| >= R`. Locally `e <- a e + sigma xi` with standard
normal `xi`: a flat well has `a = 1` (no restoring force, no ejection), a sharp unstable one `a > 1` (SAM's kick
ejects).
"""

import numpy as np
import numpy.typing as npt

from llqr.theory.arguments import Array, positive


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
    if not 1 < growth < np.inf:
        raise ValueError(f"growth must be finite and exceed 1 for an unstable well, got {growth!r}.")
    # s_n grows like growth^n; this many terms go far beyond the last one that matters in double precision.
    terms = int(np.ceil((np.log(R / sigma) + 40) / np.log(growth))) + 1
    n = np.arange(1, max(terms, 2))
    log_deviation = np.log(sigma) + 0.5 * (np.log(np.expm1(2 * n * np.log(growth))) - np.log(growth**2 - 1))
    return float(1 + np.minimum(1.0, np.sqrt(2 / np.pi) * R * np.exp(-log_deviation)).sum())
