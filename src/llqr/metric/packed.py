"""Vectors of the weights' size in the layout the inner loop works in: one packed tensor a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Packed = list[Tensor]

#: Terms of an inner product that are held at once.
PIECE = 2**22


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """In double precision where it adds up, whatever the terms are in; a piece at a time, so that it needs no room."""
    home = a[0].device
    pieces = [
        pair
        for x, y in zip(a, b, strict=True)
        for pair in zip(x.flatten().split(PIECE), y.flatten().split(PIECE), strict=True)
    ]
    return torch.stack([(x * y).sum(dtype=torch.float64).to(home) for x, y in pieces]).sum()
