"""E-KFAC that rotates only the shorter side: `U G = (S * (G Q)) Q^T` if `n <= m`, else `U G = Q (S * (Q^T G))`."""

import torch
from torch import Tensor

from llqr.metric.layout import Block
from llqr.metric.structure import Factors, Pull, Structure, clamp_singular_values, wide_product


class OneSidedEKFAC(Structure):
    """One basis `Q` of the size `s = min(m, n)` and a free scale `S`: `s^2 + m n` numbers per matrix.

    Every row (column) of `G` has its own symmetric `Q diag(S_i) Q^T`. The basis starts at the identity and is not kept
    orthogonal. Where one side is long (a head, a convolution of many channels) this is much cheaper than E-KFAC.
    """

    name = "e-kfac-one-sided"
    fallback = "diag-kfac"
    scales_with = "scale"
    multiplies = True

    @classmethod
    def longest_side(cls, block: Block) -> int:
        return min(block.shape)

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {
            "basis": self.eye(min(self.m, self.n), dtype, device),
            "scale": torch.ones(self.k, self.m, self.n, dtype=dtype, device=device),
        }

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"basis": (1, 2), "scale": (2,)} if self.n <= self.m else {"scale": (2,)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.trace(factors, g)[0]

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """Five products in all: two for `U g` and three for the pull-back."""
        q, scale = factors["basis"], factors["scale"]
        right = self.n <= self.m

        def rotated(x: Tensor) -> Tensor:
            return x @ q if right else q.mT @ x

        def contracted(x: Tensor, y: Tensor) -> Tensor:
            return x.mT @ y if right else x @ y.mT

        g_basis = rotated(g)

        def pull(r: Tensor) -> Factors:
            r_basis = rotated(r)
            return {
                "basis": contracted(r, scale * g_basis).add_(contracted(g, scale * r_basis)),
                "scale": g_basis * r_basis,
            }

        g_scaled = scale * g_basis
        return wide_product(g_scaled, q.mT) if right else wide_product(q, g_scaled), pull

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        # A sufficient bound: Q Q^T and S each take half of the range (in the logarithm).
        return {
            "basis": clamp_singular_values(factors["basis"], lower**0.25, upper**0.25),
            "scale": factors["scale"].clamp(lower**0.5, upper**0.5),
        }
