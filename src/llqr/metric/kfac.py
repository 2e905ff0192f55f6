"""`U G = U_out G U_in^T`: two small dense factors per matrix."""

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Pull, Structure, clamp_eigenvalues, clamp_singular_values, wide_product


class KFAC(Structure):
    name = "kfac"
    fallback = "diag-kfac"
    scales_with = "out"
    multiplies = True

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"out": self.eye(self.m, dtype, device), "in": self.eye(self.n, dtype, device)}

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"in": (1, 2)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.trace(factors, g)[0]

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """Five products in all: two for `U g`, three for the pull-back."""
        out, bmm = factors["out"], torch.bmm  # faster than `@`, which looks at shapes first
        g_in = bmm(g, factors["in"].mT)

        def pull(r: Tensor) -> Factors:
            return {"out": bmm(r, g_in.mT), "in": bmm(bmm(out.mT, r).mT, g)}

        return wide_product(out, g_in), pull

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return {name: clamp_eigenvalues(factor, lower**0.5, upper**0.5) for name, factor in factors.items()}


class PositiveKFAC(KFAC):
    """K-FAC with `U_out = L_out L_out^T` and `U_in = L_in L_in^T`: symmetric and positive whatever the factors."""

    name = "kfac-psd"

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        Ug, pull_squares = super().trace({name: factor @ factor.mT for name, factor in factors.items()}, g)

        def pull(r: Tensor) -> Factors:
            return {name: (slope + slope.mT) @ factors[name] for name, slope in pull_squares(r).items()}

        return Ug, pull

    def times(self, factors: Factors, number: Tensor) -> Factors:
        return super().times(factors, number.sqrt())

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return {name: clamp_singular_values(factor, lower**0.25, upper**0.25) for name, factor in factors.items()}
