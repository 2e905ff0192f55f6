"""Scalar closed forms of a well: hovering envelopes, the exact two-cycle, and the escape criterion.

Along one eigendirection, LLQR+SAM with `U = 1 / lambda_bar` is the map `z -> a z - b sign(z)` with
`a = 1 - eta mu` and `b = eta rho mu / sqrt(lambda_bar)`; vanilla SAM is the same map with `lambda` instead of `mu` and
1 instead of `lambda_bar`. All functions broadcast over arrays.
"""

import numpy as np
import numpy.typing as npt

from llqr.theory.arguments import Array, at_least, positive, stable_rate


def perceived_sharpness(lambda_bar: npt.ArrayLike, lambda_eps: npt.ArrayLike) -> Array:
    """`mu = (lambda_bar + lambda_eps) / lambda_bar`: the sharpness of the well in the metric."""
    return 1 + at_least("lambda_eps", lambda_eps, 0) / positive("lambda_bar", lambda_bar)


def amplification(lambda_bar: npt.ArrayLike) -> Array:
    """`1 / sqrt(lambda_bar)`: envelope of LLQR+SAM over envelope of vanilla SAM."""
    return 1 / np.sqrt(positive("lambda_bar", lambda_bar))


def hovering_envelope(rho: npt.ArrayLike, lambda_bar: npt.ArrayLike) -> Array:
    """`rho / sqrt(lambda_bar)`, the scale `b / (1 - a)` of LLQR+SAM's oscillation and the exact length of its probe."""
    return positive("rho", rho) * amplification(lambda_bar)


def two_cycle_amplitude(
    eta: npt.ArrayLike, rho: npt.ArrayLike, lambda_bar: npt.ArrayLike, lambda_eps: npt.ArrayLike
) -> Array:
    """`b / (1 + a) = eta rho mu / ((2 - eta mu) sqrt(lambda_bar))`: where LLQR+SAM ends up hovering."""
    rate = positive("eta", eta) * perceived_sharpness(lambda_bar, lambda_eps)
    stable_rate(rate, "eta * mu")
    return rate / (2 - rate) * hovering_envelope(rho, lambda_bar)


def vanilla_two_cycle_amplitude(eta: npt.ArrayLike, rho: npt.ArrayLike, sharpness: npt.ArrayLike) -> Array:
    """`eta rho lambda / (2 - eta lambda)` with `lambda` the full sharpness `lambda_bar + lambda_eps`."""
    rate = positive("eta", eta) * positive("sharpness", sharpness)
    stable_rate(rate, "eta * lambda")
    return rate / (2 - rate) * positive("rho", rho)


def escapes(rho: npt.ArrayLike, lambda_bar: npt.ArrayLike, r_eps: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """The paper's criterion `rho / sqrt(lambda_bar) > r_eps`; pass `lambda_bar=1` for vanilla SAM."""
    return np.asarray(hovering_envelope(rho, lambda_bar) > positive("r_eps", r_eps))


def probe_reach(eta: npt.ArrayLike, rho: npt.ArrayLike, lambda_bar: npt.ArrayLike, lambda_eps: npt.ArrayLike) -> Array:
    """How far from the minimum the hovering probe reaches: envelope plus two-cycle, `2 / (2 - eta mu)` envelopes.

    The well stops restoring once this exceeds `r_eps`, so that the criterion at a finite learning rate reads
    `rho / sqrt(lambda_bar) > r_eps (1 - eta mu / 2)`; it tends to the paper's as `eta mu -> 0`.
    """
    return hovering_envelope(rho, lambda_bar) + two_cycle_amplitude(eta, rho, lambda_bar, lambda_eps)


def scalar_step(
    z: npt.ArrayLike, eta: npt.ArrayLike, rho: npt.ArrayLike, lambda_bar: npt.ArrayLike, lambda_eps: npt.ArrayLike
) -> Array:
    """One step of the scalar map, `z <- (1 - eta mu) z - eta rho mu lambda_bar^-1/2 sign(z)`."""
    z = np.asarray(z, dtype=np.float64)
    rate = positive("eta", eta) * perceived_sharpness(lambda_bar, lambda_eps)
    return np.asarray((1 - rate) * z - rate * hovering_envelope(rho, lambda_bar) * np.sign(z))
