"""`U G = Q_out (S * (Q_out^T G Q_in)) Q_in^T`: a Kronecker basis with a free scale for every pair of its directions."""

from __future__ import annotations

import torch
from torch import Tensor

from .structure import Bounds, Factors, Stacked, clamp_singular_values


class EKFAC(Stacked):
    """The bases start at the identity and are not kept orthogonal."""

    name = "e-kfac"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"out": (self.k, self.m, self.m), "in": (self.k, self.n, self.n), "scale": (self.k, self.m, self.n)}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {
            "out": self.eye(self.m, dtype, device),
            "in": self.eye(self.n, dtype, device),
            "scale": torch.ones(self.k, self.m, self.n, dtype=dtype, device=device),
        }

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        q_out, q_in = factors["out"], factors["in"]
        return q_out @ (factors["scale"] * (q_out.mT @ g @ q_in)) @ q_in.mT

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        q_out, q_in, scale = factors["out"], factors["in"], factors["scale"]
        g_in, r_in = g @ q_in, r @ q_in
        g_basis, r_basis = q_out.mT @ g_in, q_out.mT @ r_in
        g_scaled, r_scaled = scale * g_basis, scale * r_basis
        return {
            "out": r_in @ g_scaled.mT + g_in @ r_scaled.mT,
            "in": (q_out.mT @ r).mT @ g_scaled + (q_out.mT @ g).mT @ r_scaled,
            "scale": g_basis * r_basis,
        }

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        # A sufficient bound: each of Q_out Q_out^T, Q_in Q_in^T and S takes a third of the range (in the logarithm).
        if bounds is None:
            return factors
        lower, upper = bounds[0] ** (1 / 6), bounds[1] ** (1 / 6)
        return {
            "out": clamp_singular_values(factors["out"], lower, upper),
            "in": clamp_singular_values(factors["in"], lower, upper),
            "scale": self._constrain_scale(factors["scale"], bounds[0] ** (1 / 3), bounds[1] ** (1 / 3)),
        }

    def _constrain_scale(self, scale: Tensor, lower: float, upper: float) -> Tensor:
        return scale.clamp(lower, upper)

    def matrices(self, factors: Factors) -> list[Tensor]:
        bases = [torch.kron(out, inner) for out, inner in zip(factors["out"], factors["in"], strict=True)]
        return [(basis * scale.reshape(-1)) @ basis.mT for basis, scale in zip(bases, factors["scale"], strict=True)]


class PositiveEKFAC(EKFAC):
    """E-KFAC with `S = s * s`: `U = K diag(s^2) K^T` is symmetric and positive whatever the factors."""

    name = "e-kfac-psd"

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return super().apply(_squared(factors), g)

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        gradients = super().pull_back(_squared(factors), g, r)
        return gradients | {"scale": 2 * factors["scale"] * gradients["scale"]}

    def _constrain_scale(self, scale: Tensor, lower: float, upper: float) -> Tensor:
        return scale.abs().clamp(lower**0.5, upper**0.5)

    def matrices(self, factors: Factors) -> list[Tensor]:
        return super().matrices(_squared(factors))


def _squared(factors: Factors) -> Factors:
    return factors | {"scale": factors["scale"] * factors["scale"]}
