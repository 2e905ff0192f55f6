"""`U G = Q_out (S * (Q_out^T G Q_in)) Q_in^T`: a Kronecker basis with a free scale for every pair of its directions."""

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Pull, Structure, clamp_singular_values, wide_product


class EKFAC(Structure):
    """The bases start at the identity and are not kept orthogonal."""

    name = "e-kfac"
    fallback = "e-kfac-one-sided"
    scales_with = "scale"
    multiplies = True

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {
            "out": self.eye(self.m, dtype, device),
            "in": self.eye(self.n, dtype, device),
            "scale": torch.ones(self.k, self.m, self.n, dtype=dtype, device=device),
        }

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"in": (1, 2), "scale": (2,)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.trace(factors, g)[0]

    def by_rows(self, x: Tensor) -> Tensor:
        """The rows that `Q_in` acts on."""
        return x

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """Eleven products in all: four for `U g`, seven for the pull-back."""
        q_out, q_in, scale = factors["out"], factors["in"], factors["scale"]
        out_to_basis, bmm = q_out.mT, torch.bmm  # faster than `@`, which looks at shapes first
        by_rows, shape = self.by_rows, g.shape
        g_in = bmm(by_rows(g), q_in).view(shape)
        g_basis = bmm(out_to_basis, g_in)
        g_lifted = bmm(q_out, scale * g_basis)

        def pull(r: Tensor) -> Factors:
            r_in = bmm(by_rows(r), q_in).view(shape)
            r_basis = bmm(out_to_basis, r_in)
            # Computed again rather than kept: what is kept takes memory beside the activations during `H v`.
            g_scaled, r_scaled = scale * g_basis, scale * r_basis
            of_in = bmm(by_rows(r).mT, by_rows(g_lifted))
            return {
                "out": bmm(r_in, g_scaled.mT).baddbmm_(g_in, r_scaled.mT),
                "in": of_in.baddbmm_(by_rows(g).mT, by_rows(bmm(q_out, r_scaled))),
                "scale": g_basis * r_basis,
            }

        return wide_product(by_rows(g_lifted), q_in.mT).view(shape), pull

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        # A sufficient bound: each of Q_out Q_out^T, Q_in Q_in^T and S takes a third of the range (in the logarithm).
        a, b = lower ** (1 / 6), upper ** (1 / 6)
        bases = {name: clamp_singular_values(factors[name], a, b) for name in ("out", "in")}
        return bases | {"scale": self._project_scale(factors["scale"], lower ** (1 / 3), upper ** (1 / 3))}

    def _project_scale(self, scale: Tensor, lower: float, upper: float) -> Tensor:
        return scale.clamp(lower, upper)


class PositiveEKFAC(EKFAC):
    """E-KFAC with `S = s * s`: `U = K diag(s^2) K^T` is symmetric and positive whatever the factors."""

    name = "e-kfac-psd"
    fallback = "diag-kfac"

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        Ug, pull_squares = super().trace(factors | {"scale": factors["scale"].square()}, g)

        def pull(r: Tensor) -> Factors:
            slopes = pull_squares(r)
            return slopes | {"scale": 2 * factors["scale"] * slopes["scale"]}

        return Ug, pull

    def times(self, factors: Factors, number: Tensor) -> Factors:
        return super().times(factors, number.sqrt())

    def _project_scale(self, scale: Tensor, lower: float, upper: float) -> Tensor:
        return scale.abs().clamp(lower**0.5, upper**0.5)
