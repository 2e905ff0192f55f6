"""A dense `U`: one symmetric matrix for all entries of a block, for small models and references."""

import torch
from torch import Tensor

from llqr.metric.layout import Block
from llqr.metric.structure import Factors, Structure, clamp_eigenvalues


class Dense(Structure):
    """`U = (F + F^T) / 2`, symmetric whatever the factor `F`; vectors are full blocks too."""

    name = "dense"
    takes_vectors = True
    fallback = "diagonal"
    scales_with = "dense"

    @property
    def size(self) -> int:
        return self.blocks[0].size

    @classmethod
    def longest_side(cls, block: Block) -> int:
        return block.size

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return {"dense": self.eye(self.size, dtype, device)}

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        factor, flat = factors["dense"], g.reshape(self.k, self.size, 1)
        return (0.5 * (factor @ flat + factor.mT @ flat)).reshape(g.shape)

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        return {"dense": clamp_eigenvalues(factors["dense"], lower, upper)}
