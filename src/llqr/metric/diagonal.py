"""`U = diag(d)`: one number an entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llqr.metric.structure import Bounds, Factors, Flat

#: The paper's runs keep diagonal and scalar factors at least this large after the moving average.
FLOOR = 1e-8


class Diagonal(Flat):
    """Also what every vector (bias, normalisation scale) gets beside a matrix structure."""

    name = "diagonal"
    linear_in = (("diagonal",),)
    _seen: tuple[Tensor, list[Tensor]] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"diagonal": (sum(self.sizes),)}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"diagonal": torch.ones(sum(self.sizes), dtype=dtype, device=device)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return factors["diagonal"] * g

    def apply_pieces(self, factors: Factors, pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        wide = [piece if piece.dtype == dtype else piece.to(dtype) for piece in pieces]
        return list(torch._foreach_mul(wide, self._views(factors["diagonal"])))

    def _views(self, diagonal: Tensor) -> list[Tensor]:
        """By block, kept for the tensor seen last: between two refreshes every step applies the same one."""
        if self._seen is None or self._seen[0] is not diagonal:
            self._seen = diagonal, self.unpack(diagonal)
        return self._seen[1]

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        return {"diagonal": r * g}

    def units(self, gradients: Factors) -> list[Tensor]:
        return self.by_layer(gradients["diagonal"])

    def scaled(self, gradients: Factors, numbers: Tensor) -> Factors:
        return {"diagonal": self.scale_layers(gradients["diagonal"], numbers)}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        lower, upper = bounds or (FLOOR, None)
        return {"diagonal": factors["diagonal"].clamp(lower, upper)}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return [torch.diag(d.reshape(-1)) for d in self.unpack(factors["diagonal"])]

    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        for block, diagonal in zip(self.blocks, self.unpack(factors["diagonal"]), strict=True):
            yield block.name, diagonal
