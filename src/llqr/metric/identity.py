"""`U = I`: blocks that are left as they are. They have no factors, but the objective depends on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llqr.metric.structure import Bounds, Factors, Flat


class Identity(Flat):
    name = "identity"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return g

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        return {}

    def units(self, gradients: Factors) -> list[Tensor]:
        return []

    def scaled(self, gradients: Factors, numbers: Tensor) -> Factors:
        return {}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        return {}

    def matrices(self, factors: Factors) -> list[Tensor]:
        return [torch.eye(block.size, dtype=block.dtype, device=block.device) for block in self.blocks]

    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        yield from ()
