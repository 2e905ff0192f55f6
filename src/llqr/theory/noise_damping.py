"""Metric damping under gradient noise: `z <- q z - eta eps / d` with `q = 1 - eta lambda / d` (Appendix B)."""

import numpy.typing as npt

from llqr.theory.arguments import Array, positive


def stationary_variance(eta: npt.ArrayLike, lam: npt.ArrayLike, d: npt.ArrayLike, tau: npt.ArrayLike) -> Array:
    """`eta tau^2 / (lambda (2 d - eta lambda))`."""
    eta, lam, d = stable(eta, lam, d)
    return eta * positive("tau", tau) ** 2 / (lam * (2 * d - eta * lam))


def one_step_motion(eta: npt.ArrayLike, lam: npt.ArrayLike, d: npt.ArrayLike, tau: npt.ArrayLike) -> Array:
    """`E[(z_{t+1} - z_t)^2] = 2 eta^2 tau^2 / (d (2 d - eta lambda))` at stationarity."""
    eta, lam, d = stable(eta, lam, d)
    return 2 * eta**2 * positive("tau", tau) ** 2 / (d * (2 * d - eta * lam))


def stable(eta: npt.ArrayLike, lam: npt.ArrayLike, d: npt.ArrayLike) -> tuple[Array, Array, Array]:
    rate, curvature, denominator = positive("eta", eta), positive("lam", lam), positive("d", d)
    if (denominator <= rate * curvature / 2).any():
        raise ValueError(f"d must exceed eta * lam / 2 for the mode to be stable, got {d!r}.")
    return rate, curvature, denominator
