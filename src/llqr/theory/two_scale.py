"""The two-scale quadratic model `H = H_bar + H_eps` and its exact LLQR+SAM recursions (Section 4, Appendix B)."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from llqr.theory.arguments import SYMMETRY_TOLERANCE, Array, positive, symmetric


class TwoScale:
    """A minimum at the origin of `L = 1/2 e.H e` with `H = H_bar + H_eps` and the metric `U = H_bar^-1`.

    `H_bar` (SPD) is the average geometry that the slow metric has learned, `H_eps` (PSD) the pothole that it has not.
    The two need not commute. A number stands for a 1 x 1 matrix, a vector for a diagonal matrix.
    """

    def __init__(self, H_bar: npt.ArrayLike, H_eps: npt.ArrayLike) -> None:
        self.H_bar = symmetric("H_bar", H_bar)
        self.H_eps = symmetric("H_eps", H_eps)
        if self.H_bar.shape != self.H_eps.shape:
            raise ValueError(f"H_bar and H_eps must have one shape, got {self.H_bar.shape} and {self.H_eps.shape}.")
        self._average, self._basis = np.linalg.eigh(self.H_bar)
        if self._average[0] <= 0:
            raise ValueError(f"H_bar must be positive definite, its smallest eigenvalue is {self._average[0]:g}.")
        lowest = float(np.linalg.eigvalsh(self.H_eps)[0])
        if lowest < -SYMMETRY_TOLERANCE * np.abs(self.H).max():
            raise ValueError(f"H_eps must be positive semi-definite, its smallest eigenvalue is {lowest:g}.")

    @property
    def dim(self) -> int:
        return int(self.H_bar.shape[0])

    @cached_property
    def H(self) -> Array:
        return self.H_bar + self.H_eps

    @cached_property
    def U(self) -> Array:
        """The inverse metric `H_bar^-1` (Assumption 1)."""
        return self._power(-1.0)

    @cached_property
    def whitening(self) -> Array:
        """`H_bar^1/2`, so that `y = H_bar^1/2 e`."""
        return self._power(0.5)

    @cached_property
    def unwhitening(self) -> Array:
        """`H_bar^-1/2`."""
        return self._power(-0.5)

    @cached_property
    def A(self) -> Array:
        """The normalised curvature `H_bar^-1/2 H H_bar^-1/2 = I + H_bar^-1/2 H_eps H_bar^-1/2`."""
        A = np.eye(self.dim) + self.unwhitening @ self.H_eps @ self.unwhitening
        return (A + A.T) / 2

    @cached_property
    def mu(self) -> Array:
        """Perceived sharpnesses: the eigenvalues of `A`, smallest first, each at least 1."""
        return self._modes[0]

    @cached_property
    def commuting(self) -> bool:
        """Whether `H_bar` and `H_eps` share an eigenbasis, as the main text assumes."""
        commutator = self.H_bar @ self.H_eps - self.H_eps @ self.H_bar
        scale = np.linalg.norm(self.H_bar) * np.linalg.norm(self.H_eps)
        return bool(np.linalg.norm(commutator) <= SYMMETRY_TOLERANCE * scale)

    @cached_property
    def eigenbasis(self) -> tuple[Array, Array, Array]:
        """`(lambda_bar, lambda_eps, V)` of a commuting pair, directions in the columns of `V`, in the order of `mu`."""
        if not self.commuting:
            raise ValueError(
                "H_bar and H_eps do not commute, so they have no shared eigenbasis; use the whitened form."
            )
        V = self._modes[1].copy()
        # Inside an eigenspace of A the two may still differ: rotate each such group to diagonalise H_bar as well.
        start = 0
        for stop in range(1, self.dim + 1):
            if stop == self.dim or self.mu[stop] - self.mu[start] > 1e-9 * self.mu[-1]:
                group = V[:, start:stop]
                V[:, start:stop] = group @ np.linalg.eigh(group.T @ self.H_bar @ group)[1]
                start = stop
        return np.diag(V.T @ self.H_bar @ V).copy(), np.diag(V.T @ self.H_eps @ V).copy(), V

    def step(self, e: npt.ArrayLike, eta: float, rho: float) -> Array:
        """The exact recursion, `e <- (I - eta U H) e - eta rho |H e|_U^-1 U H U H e`; rows of `e` are independent."""
        e = self._rows(e)
        g = e @ self.H
        d = g @ self.U
        norm = np.sqrt((g * d).sum(-1, keepdims=True))
        return e - float(positive("eta", eta)) * (
            d + float(positive("rho", rho)) * (d @ self.H @ self.U) / _off_zero(norm)
        )

    def whitened_step(self, y: npt.ArrayLike, eta: float, rho: float) -> Array:
        """The recursion in `y = H_bar^1/2 e`: `y <- (I - eta A) y - eta rho A^2 y / |A y|`."""
        y = self._rows(y)
        Ay = y @ self.A
        norm = np.linalg.norm(Ay, axis=-1, keepdims=True)
        return y - float(positive("eta", eta)) * (Ay + float(positive("rho", rho)) * (Ay @ self.A) / _off_zero(norm))

    def coordinate_step(self, z: npt.ArrayLike, eta: float, rho: float) -> Array:
        """The recursion of the coordinates `z_i = v_i . e` of a commuting pair (`eigenbasis` gives `v_i`)."""
        lambda_bar, _, _ = self.eigenbasis
        z = self._rows(z)
        norm = np.sqrt((self.mu**2 * lambda_bar * z**2).sum(-1, keepdims=True))
        shrink = float(positive("eta", eta)) * self.mu * (1 + float(positive("rho", rho)) * self.mu / _off_zero(norm))
        return np.asarray(z - shrink * z)

    def trajectory(self, e: npt.ArrayLike, eta: float, rho: float, steps: int) -> Array:
        """`steps` applications of `step`, the start included: shape `(steps + 1, *e.shape)`."""
        return roll(lambda point: self.step(point, eta, rho), self._rows(e), steps)

    @cached_property
    def _modes(self) -> tuple[Array, Array]:
        return np.linalg.eigh(self.A)

    def _power(self, exponent: float) -> Array:
        return np.asarray((self._basis * self._average**exponent) @ self._basis.T)

    def _rows(self, e: npt.ArrayLike) -> Array:
        e = np.asarray(e, dtype=np.float64)
        if e.shape[-1:] != (self.dim,):
            raise ValueError(f"the displacement must have {self.dim} entries in its last axis, got shape {e.shape}.")
        return e


def roll(step: Callable[[Array], Array], start: Array, steps: int) -> Array:
    """Iterate `step` from `start` and keep every point, the start first."""
    points = [start]
    for _ in range(steps):
        points.append(step(points[-1]))
    return np.stack(points)


def _off_zero(norm: Array) -> Array:
    """At the minimum itself the probe has no direction and does not move, so any nonzero norm will do."""
    return np.where(norm > 0, norm, 1.0)
