"""The unit a metric is made of: one parameter, or a third of a fused q/k/v projection, seen as a matrix or a vector."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """A piece of one parameter that owns one diagonal block of `U`.

    `shape` is `(m, n)` = (out, in) for a matrix and `(n,)` for a vector; `rows` selects the piece along the parameter's
    first dimension when the parameter is fused; `layer` groups weight and bias. `native` and `strides` are the piece's
    own shape and memory order (those of a channels-last convolution, say). `kernel_positions` is `kh * kw` for a
    convolution, whose `n = in * kh * kw`, and 1 otherwise.

    Example (a metric's blocks):
        >>> from llqr import Metric
        >>> [(block.name, block.shape) for block in Metric(torch.nn.Conv2d(3, 8, 5)).blocks]
        [('weight', (8, 75)), ('bias', (8,))]
    """

    name: str
    parameter: str
    layer: str
    shape: tuple[int, ...]
    native: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[int, int] | None
    dtype: torch.dtype
    device: torch.device
    kernel_positions: int = 1

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    def piece(self, tensor: Tensor) -> Tensor:
        """This block's part of a tensor that has the parameter's shape, as a view in its native shape."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]
