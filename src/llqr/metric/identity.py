"""`U = I`: blocks that are left as they are. They have no factors, but the objective depends on them."""

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Flat, Pull


class Identity(Flat):
    name = "identity"

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return g

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        return g, lambda r: {}

    def times(self, factors: Factors, number: Tensor) -> Factors:
        """Blocks that are left as they are stay so."""
        return factors

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return factors
