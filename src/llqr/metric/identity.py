"""`U = I`: blocks that are left as they are. They have no factors, but the objective depends on them."""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.metric.flat import Flat
from llqr.metric.structure import Bounds, Factors, Pull


class Identity(Flat):
    name = "identity"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return g

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        return g, lambda r: {}

    def times(self, factors: Factors, number: Tensor) -> Factors:
        """Blocks that are left as they are stay so."""
        return factors

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        return factors

    def matrices(self, factors: Factors) -> list[Tensor]:
        return [torch.eye(block.size, dtype=block.dtype, device=block.device) for block in self.blocks]
