"""Argument checks of the closed forms: the float64 array, or an error that names the argument."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SYMMETRY_TOLERANCE = 1e-10
"""Relative size of a skew part, or of a negative eigenvalue, that still counts as rounding."""


def positive(name: str, value: npt.ArrayLike) -> Array:
    """`value` as a float64 array; every entry must be finite and above zero."""
    array = np.asarray(value, dtype=np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return array


def at_least(name: str, value: npt.ArrayLike, bound: float) -> Array:
    """`value` as a float64 array; every entry must be finite and no smaller than `bound`."""
    array = np.asarray(value, dtype=np.float64)
    if not (np.isfinite(array).all() and (array >= bound).all()):
        raise ValueError(f"{name} must be finite and at least {bound:g}, got {value!r}.")
    return array


def symmetric(name: str, value: npt.ArrayLike) -> Array:
    """`value` as a symmetric matrix; a number is 1 x 1 and a vector is a diagonal."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim < 2:
        array = np.diag(np.atleast_1d(array))
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] == 0:
        raise ValueError(f"{name} must be a number, a vector (a diagonal) or a square matrix, got shape {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite.")
    if np.abs(array - array.T).max() > SYMMETRY_TOLERANCE * np.abs(array).max():
        raise ValueError(f"{name} must be symmetric.")
    return (array + array.T) / 2


def stable_rate(eta_sharpness: Array, what: str) -> None:
    """Refuse eta * sharpness >= 2, where the well repels plain descent and no bounded two-cycle exists."""
    if (eta_sharpness >= 2).any():
        raise ValueError(f"eta is too large: {what} must stay below 2, got {float(eta_sharpness.max()):g}.")
