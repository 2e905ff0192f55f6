"""`U G = Diag(a) G Diag(b)`: K-FAC with diagonal factors, `m + n` numbers per matrix."""

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Pull, Structure


class DiagKFAC(Structure):
    name = "diag-kfac"
    scales_with = "out"

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {
            "out": torch.ones(self.k, self.m, dtype=dtype, device=device),
            "in": torch.ones(self.k, self.n, dtype=dtype, device=device),
        }

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"in": (1,)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return factors["out"].unsqueeze(2) * g * factors["in"].unsqueeze(1)

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        def pull(r: Tensor) -> Factors:
            product = r * g
            return {
                "out": (product @ factors["in"].unsqueeze(2)).squeeze(2),
                "in": (factors["out"].unsqueeze(1) @ product).squeeze(1),
            }

        return self.apply(factors, g), pull

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return {name: factor.clamp(lower**0.5, upper**0.5) for name, factor in factors.items()}
