"""`U G = Diag(a) G Diag(b)`: K-FAC with diagonal factors, `m + n` numbers per matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.metric.stacked import Stacked
from llqr.metric.structure import Bounds, Factors, Pull


class DiagKFAC(Stacked):
    name = "diag-kfac"
    linear_in = (("out",), ("in",))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"out": (self.k, self.m), "in": (self.k, self.n)}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in self.shapes().items()}

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

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        if bounds is None:
            return factors
        return {name: factor.clamp(bounds[0] ** 0.5, bounds[1] ** 0.5) for name, factor in factors.items()}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return [
            torch.diag(torch.outer(out, inner).reshape(-1))
            for out, inner in zip(factors["out"], factors["in"], strict=True)
        ]
