"""`U G = U_out G U_in^T`: two small dense factors per matrix."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from llqr.metric.spectrum import clamp_eigenvalues, clamp_singular_values
from llqr.metric.stacked import Stacked, wide_product
from llqr.metric.structure import Bounds, Factors, FactorSets, Pull


class KFAC(Stacked):
    name = "kfac"
    fallback = "diag-kfac"
    linear_in: ClassVar[FactorSets] = (("out",), ("in",))
    multiplies = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"out": (self.k, self.m, self.m), "in": (self.k, self.n, self.n)}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"out": self.eye(self.m, dtype, device), "in": self.eye(self.n, dtype, device)}

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"in": (1, 2)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.trace(factors, g)[0]

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """Five products in all: two for `U g`, three for the pull-back."""
        out = factors["out"]
        g_in = g @ factors["in"].mT

        def pull(r: Tensor) -> Factors:
            return {"out": r @ g_in.mT, "in": (out.mT @ r).mT @ g}

        return wide_product(out, g_in), pull

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
    linear_in = ()

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        Ug, pull_squares = super().trace(_squared(factors), g)

        def pull(r: Tensor) -> Factors:
            return {name: (slope + slope.mT) @ factors[name] for name, slope in pull_squares(r).items()}

        return Ug, pull

    def times(self, factors: Factors, number: Tensor) -> Factors:
        return factors | {"out": factors["out"] * number.sqrt().to(factors["out"])}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        if bounds is None:
            return factors
        lower, upper = bounds[0] ** 0.25, bounds[1] ** 0.25
        return {name: clamp_singular_values(factor, lower, upper) for name, factor in factors.items()}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return super().matrices(_squared(factors))


def _squared(factors: Factors) -> Factors:
    return {name: factor @ factor.mT for name, factor in factors.items()}
