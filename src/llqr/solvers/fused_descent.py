"""A heavy-ball step on a large stack of factors in two passes over memory, by `torch.compile`.

The first pass reads the slopes for their norms, the second does the rest: 24 bytes an entry in float32. With a kernel
for each of them, zeroing what is not finite, taking norms, scaling and torch's fused SGD move 40.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from llqr.metric import Stacked, Structure

#: A factor of so many entries, its whole stack together, is worth it.
LARGE = 2**20
#: Entries that are squared and added up together, so that there is work for a whole GPU also in a stack of few.
CHUNK = 4096


def is_fused(group: Structure, factor: Tensor) -> bool:
    """Whether steps on this factor of a group are to be fused."""
    return isinstance(group, Stacked) and factor.numel() >= LARGE


def descend(factor: Tensor, momentum: Tensor, slope: Tensor, limit: float, lr: float | Tensor, beta: float) -> None:
    """`m <- beta m + clip(slope)`, `F <- F - lr m`, in place, for a stack of blocks `(k, ...)`.

    A block's slope is bounded by `limit` in its norm, and entries that are not finite count as zero.
    """
    blocks = slope.shape[0]
    chunks = _plain(slope.reshape(-1, gcd(prod(slope.shape[1:]), CHUNK)))
    norms = _compiled(_squares)(chunks).view(blocks, -1).sum(1).sqrt()
    shrink = (norms / max(limit, torch.finfo(norms.dtype).tiny)).clamp_min(1.0).reciprocal().unsqueeze(1)
    rows = [_plain(tensor.view(blocks, -1)) for tensor in (factor, momentum)]
    _compiled(_move)(*rows, _plain(slope.reshape(blocks, -1)), _plain(shrink), lr, beta)


def _plain(tensor: Tensor) -> Tensor:
    """Not known as a view: torch would compile anew for every shape of what it is a view of."""
    return tensor.data


def _squares(chunks: Tensor) -> Tensor:
    return _finite(chunks).square().sum(1)


def _move(factor: Tensor, momentum: Tensor, slope: Tensor, shrink: Tensor, lr: float | Tensor, beta: float) -> None:
    momentum.copy_(beta * momentum + _finite(slope) * shrink)
    factor.copy_(factor - lr * momentum)


def _finite(slope: Tensor) -> Tensor:
    """In at least float32, zero where it is not finite."""
    wide = slope.to(torch.promote_types(slope.dtype, torch.float32))
    return torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # For any shape: a metric has several, and they are all walked through alike.
    return torch.compile(function, dynamic=True)
