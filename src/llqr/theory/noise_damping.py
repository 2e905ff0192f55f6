"""Metric damping under gradient noise: `z <- q z - eta eps / d` with `q = 1 - eta lambda / d` (Appendix B)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llqr.theory.arguments import Array, positive


def stationary_variance(eta: npt.ArrayLike, lam: npt.ArrayLike, d: npt.ArrayLike, tau: npt.ArrayLike) -> Array:
    """`eta tau^2 / (lambda (2 d - eta lambda))`."""
    eta, lam, d = _stable(eta, lam, d)
    return eta * positive("tau", tau) ** 2 / (lam * (2 * d - eta * lam))


def one_step_motion(eta: npt.ArrayLike, lam: npt.ArrayLike, d: npt.ArrayLike, tau: npt.ArrayLike) -> Array:
    """`E[(z_{t+1} - z_t)^2] = 2 eta^2 tau^2 / (d (2 d - eta lambda))` at stationarity."""
    eta, lam, d = _stable(eta, lam, d)
    return 2 * eta**2 * positive("tau", tau) ** 2 / (d * (2 * d - eta * lam))


@dataclass(frozen=True)
class NoisyMode:
    """Averages over a simulated run."""

    variance: float
    motion: float


def simulate_mode(
    eta: float, lam: float, d: float, tau: float, *, steps: int = 1_000_000, chains: int = 8, seed: int = 0
) -> NoisyMode:
    """`steps` steps of the recursion in each of `chains` chains, started at stationarity.

    Blocks of the linear recursion are evaluated at once: within a block `z_k = q^k z_0 + sum_j q^(k-1-j) w_j`, with
    `w = -eta eps / d`, is a triangular matrix applied to the noise.
    """
    e, l, denominator = (float(value) for value in _stable(eta, lam, d))
    q = 1 - e * l / denominator
    block = min(256, steps)
    lag = np.subtract.outer(np.arange(block), np.arange(block))
    response = np.where(lag >= 0, q ** np.maximum(lag, 0), 0.0)
    carry = q ** np.arange(1, block + 1)
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(chains) * np.sqrt(float(stationary_variance(eta, lam, d, tau)))
    squares = motions = 0.0
    blocks = -(-steps // block)
    for _ in range(blocks):
        kick = -e / denominator * float(tau) * rng.standard_normal((block, chains))
        path = response @ kick + carry[:, None] * z
        moves = np.diff(path, axis=0, prepend=z[None])
        squares += float((path**2).mean())
        motions += float((moves**2).mean())
        z = path[-1]
    return NoisyMode(squares / blocks, motions / blocks)


def _stable(eta: npt.ArrayLike, lam: npt.ArrayLike, d: npt.ArrayLike) -> tuple[Array, Array, Array]:
    rate, curvature, denominator = positive("eta", eta), positive("lam", lam), positive("d", d)
    if (denominator <= rate * curvature / 2).any():
        raise ValueError(f"d must exceed eta * lam / 2 for the mode to be stable, got {d!r}.")
    return rate, curvature, denominator
