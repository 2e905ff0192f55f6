"""`U = s I`: one number per layer, shared by its weight and its bias."""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.metric.diagonal import FLOOR
from llqr.metric.flat import Flat
from llqr.metric.structure import Bounds, Factors, Pull


class Scalar(Flat):
    name = "scalar"
    linear_in = (("scalar",),)
    scales_entries = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"scalar": (len(self.layers),)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.scale_layers(g, factors["scalar"])

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        return self.apply(factors, g), lambda r: {"scalar": self.sum_layers(r * g)}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        lower, upper = bounds or (FLOOR, None)
        return {"scalar": factors["scalar"].clamp(lower, upper)}

    def matrices(self, factors: Factors) -> list[Tensor]:
        numbers = dict(zip(self.layers, factors["scalar"], strict=True))
        return [numbers[b.layer] * torch.eye(b.size).to(numbers[b.layer]) for b in self.blocks]
