"""A heavy-ball step on a large stack of factors in two passes over memory, by `torch.compile`.

The first pass reads the slopes for their norms, the second does the rest. Written out with one kernel an operation, as
`torch.optim` and the clipping of `metric.clipping` have it, the same step reads and writes about twice as much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from .metric.structure import Stacked, Structure

#: A group of so many stored scalars is worth compiling for.
LARGE = 2**20
#: Entries that are squared and added up together, so that there is work for a whole GPU also in a stack of few.
CHUNK = 4096


def is_large(group: Structure) -> bool:
    """Whether a step on this group's factors is to be fused."""
    return isinstance(group, Stacked) and group.stored() >= LARGE


def descend(factor: Tensor, momentum: Tensor, slope: Tensor, limit: float, lr: float, beta: float) -> None:
    """`m <- beta m + clip(slope)`, `F <- F - lr m`, in place, for a stack of blocks `(k, ...)`.

    A block's slope is bounded by `limit` in its norm, and entries that are not finite count as zero.
    """
    entries = prod(slope.shape[1:])
    chunks = slope.reshape(slope.shape[0], -1, gcd(entries, CHUNK))
    norms = _compiled(_squares)(chunks).sum(1).sqrt()
    shrink = (norms / max(limit, torch.finfo(norms.dtype).tiny)).clamp_min(1.0).reciprocal()
    _compiled(_move)(factor.flatten(1), momentum.flatten(1), slope.flatten(1), shrink.unsqueeze(1), lr, beta)


def _squares(chunks: Tensor) -> Tensor:
    return _finite(chunks).square().sum(2)


def _move(factor: Tensor, momentum: Tensor, slope: Tensor, shrink: Tensor, lr: float, beta: float) -> None:
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
