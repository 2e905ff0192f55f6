"""`U = diag(d)`: one number per entry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llqr.metric.flat import Flat
from llqr.metric.structure import Bounds, Factors, Pull

#: The paper's runs keep diagonal and scalar factors at least this large after the moving average.
FLOOR = 1e-8


class Diagonal(Flat):
    """Also what every vector (bias, normalisation scale) gets beside a structure of matrices."""

    name = "diagonal"
    linear_in = (("diagonal",),)
    scales_entries = True
    _seen: tuple[Tensor, list[Tensor]] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"diagonal": (sum(self.sizes),)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return factors["diagonal"] * g

    def apply_pieces(self, factors: Factors, pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        wide = [piece if piece.dtype == dtype else piece.to(dtype) for piece in pieces]
        return list(torch._foreach_mul(wide, self._views(factors["diagonal"])))

    def _views(self, diagonal: Tensor) -> list[Tensor]:
        """By block, cached for the last tensor: between two refreshes every step applies the same one."""
        if self._seen is None or self._seen[0] is not diagonal:
            self._seen = diagonal, self.unpack(diagonal)
        return self._seen[1]

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        return self.apply(factors, g), lambda r: {"diagonal": r * g}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        lower, upper = bounds or (FLOOR, None)
        return {"diagonal": factors["diagonal"].clamp(lower, upper)}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return [torch.diag(d.reshape(-1)) for d in self.unpack(factors["diagonal"])]
