"""`U G = U_out G U_in^T`: two small dense factors a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from .structure import Bounds, Factors, Stacked, clamp_eigenvalues, clamp_singular_values


class KFAC(Stacked):
    name = "kfac"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"out": (self.k, self.m, self.m), "in": (self.k, self.n, self.n)}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"out": self.eye(self.m, dtype, device), "in": self.eye(self.n, dtype, device)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return factors["out"] @ (g @ factors["in"].mT)

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        return {"out": r @ (g @ factors["in"].mT).mT, "in": (factors["out"].mT @ r).mT @ g}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        if bounds is None:
            return factors
        lower, upper = bounds[0] ** 0.5, bounds[1] ** 0.5
        return {name: clamp_eigenvalues(factor, lower, upper) for name, factor in factors.items()}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return [torch.kron(out, inner) for out, inner in zip(factors["out"], factors["in"], strict=True)]


class PositiveKFAC(KFAC):
    """K-FAC with `U_out = L_out L_out^T` and `U_in = L_in L_in^T`: symmetric and positive whatever the factors."""

    name = "kfac-psd"

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return super().apply(_squared(factors), g)

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        outer = super().pull_back(_squared(factors), g, r)
        return {name: (outer[name] + outer[name].mT) @ factor for name, factor in factors.items()}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        if bounds is None:
            return factors
        lower, upper = bounds[0] ** 0.25, bounds[1] ** 0.25
        return {name: clamp_singular_values(factor, lower, upper) for name, factor in factors.items()}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return super().matrices(_squared(factors))


def _squared(factors: Factors) -> Factors:
    return {name: factor @ factor.mT for name, factor in factors.items()}
