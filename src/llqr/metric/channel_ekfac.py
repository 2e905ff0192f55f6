"""E-KFAC for convolutions with one basis for the input channels, shared by all kernel positions.

`U G = Q_out (S * (Q_out^T G (Q_in x I))) (Q_in x I)^T` with the identity `I` over the kernel positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llqr.metric.ekfac import EKFAC
from llqr.metric.layout import Block
from llqr.metric.structure import Factors


class ChannelEKFAC(EKFAC):
    """`out^2 + in^2 + m n` numbers per convolution `(out, in, kh, kw)`; any other matrix has plain E-KFAC.

    The scale is free: one number for every output direction, input direction and kernel position.
    """

    name = "e-kfac-channels"

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.channels = blocks[0].shape[1] // blocks[0].kernel_positions
        super().__init__(blocks)

    @classmethod
    def longest_side(cls, block: Block) -> int:
        return max(block.shape[0], block.shape[1] // block.kernel_positions)

    @classmethod
    def sorts_positions(cls, block: Block) -> bool:
        """Always: each position is then a matrix `(out, in)`, whose rows the basis of the input channels acts on."""
        return block.kernel_positions > 1

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return super().identity(dtype, device) | {"in": self.eye(self.channels, dtype, device)}

    def by_rows(self, x: Tensor) -> Tensor:
        """One for each row of `G` and each kernel position."""
        return x.reshape(self.k, -1, self.channels)

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"scale": (2,)}
