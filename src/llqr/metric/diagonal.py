"""`U = diag(d)`: one number per entry."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Flat, Pull

#: The authors' code keeps diagonal and scalar factors at least this large after the moving average.
FLOOR = 1e-8


class Diagonal(Flat):
    """Also what every vector (bias, normalisation scale) gets beside a structure of matrices."""

    name = "diagonal"
    scales_with = "diagonal"
    scales_entries = True
    default_bounds = FLOOR, inf
    _views: tuple[Tensor, list[Tensor]] | None = None

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"diagonal": torch.ones(self.size, dtype=dtype, device=device)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return factors["diagonal"] * g

    def apply_each(self, factors: Factors, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Without packing: one multi-tensor product."""
        diagonal = factors["diagonal"]
        if self._views is None or self._views[0] is not diagonal:  # between two refreshes every step applies the same
            self._views = diagonal, self.unpack(diagonal)
        wide = [piece if piece.dtype == diagonal.dtype else piece.to(diagonal.dtype) for piece in pieces]
        return list(torch._foreach_mul(wide, self._views[1]))

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        return self.apply(factors, g), lambda r: {"diagonal": r * g}

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return {"diagonal": factors["diagonal"].clamp(lower, upper)}
