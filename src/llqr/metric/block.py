"""The unit a metric is made of: one parameter, or a third of a fused q/k/v projection, seen as a matrix or a vector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def row_by_row(self) -> bool:
        """Whether its memory holds one row of the matrix after the other."""
        return self._memory().is_contiguous()

    @cached_property
    def channels_last(self) -> bool:
        """Whether its memory holds `(out, kh, kw, in)` instead of `(out, in, kh, kw)`."""
        return self.kernel_positions > 1 and not self.row_by_row and self._memory().movedim(1, -1).is_contiguous()

    def _memory(self) -> Tensor:
        return torch.empty_strided(self.native, self.strides, device="meta")

    def piece(self, tensor: Tensor) -> Tensor:
        """This block's part of a tensor that has the parameter's shape, as a view in its native shape."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]
