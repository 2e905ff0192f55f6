"""`U = s I`: one number per layer, shared by its weight and its bias."""

from math import inf

import torch
from torch import Tensor

from llqr.metric.diagonal import FLOOR
from llqr.metric.structure import Factors, Flat, Pull


class Scalar(Flat):
    name = "scalar"
    scales_with = "scalar"
    scales_entries = True
    default_bounds = FLOOR, inf

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"scalar": torch.ones(len(self.layers), dtype=dtype, device=device)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.scale_layers(g, factors["scalar"])

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        return self.apply(factors, g), lambda r: {"scalar": self.sum_layers(r * g)}

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return {"scalar": factors["scalar"].clamp(lower, upper)}
