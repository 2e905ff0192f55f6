"""E-KFAC for convolutions with one basis for the input channels, shared by all kernel positions.

`U G = Q_out (S * (Q_out^T G (Q_in x I))) (Q_in x I)^T` with the identity `I` over the kernel positions.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from llqr.metric.block import Block
from llqr.metric.ekfac import EKFAC
from llqr.metric.structure import Factors, Pull


class ChannelEKFAC(EKFAC):
    """`out^2 + in^2 + m n` numbers per convolution `(out, in, kh, kw)`; any other matrix has plain E-KFAC.

    The scale is free: one number for every output direction, input direction and kernel position.
    """

    name = "e-kfac-channels"

    @property
    def positions(self) -> int:
        return self.blocks[0].kernel_positions

    @property
    def channels(self) -> int:
        return self.n // self.positions

    @classmethod
    def longest_side(cls, block: Block) -> int:
        return max(block.shape[0], block.shape[1] // block.kernel_positions)

    @classmethod
    def group_key(cls, block: Block) -> Hashable:
        return block.shape, block.kernel_positions

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return super().shapes() | {"in": (self.k, self.channels, self.channels)}

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        return super().identity(dtype, device) | {"in": self.eye(self.channels, dtype, device)}

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        return {"scale": (2,)}

    def apply_in_memory_order(self, factors: Factors, g: Tensor) -> Tensor:
        return super().trace(factors, g)[0]  # channels-last memory is sorted by kernel position

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """As in E-KFAC, with the columns sorted by kernel position: each position is then a matrix `(out, in)`."""
        Ug, pull_sorted = super().trace(factors | {"scale": self._sorted(factors["scale"])}, self._sorted(g))

        def pull(r: Tensor) -> Factors:
            slopes = pull_sorted(self._sorted(r))
            return slopes | {"scale": self._unsorted(slopes["scale"])}

        return self._unsorted(Ug), pull

    def _sorted(self, x: Tensor) -> Tensor:
        """Columns from the order (channel, position) to (position, channel)."""
        return x.view(self.k, self.m, self.channels, self.positions).transpose(2, 3).reshape(self.k, self.m, self.n)

    def _unsorted(self, x: Tensor) -> Tensor:
        return x.view(self.k, self.m, self.positions, self.channels).transpose(2, 3).reshape(self.k, self.m, self.n)

    def matrices(self, factors: Factors) -> list[Tensor]:
        q_in = factors["in"]
        eye = torch.eye(self.positions, dtype=q_in.dtype, device=q_in.device)
        return super().matrices(factors | {"in": torch.stack([torch.kron(q, eye) for q in q_in])})
