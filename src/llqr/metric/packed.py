"""Vectors of the weights' size in the layout the inner loop works in: one packed tensor per group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Packed = list[Tensor]

#: Terms of an inner product that are in memory at once.
PIECE = 2**22
#: BLAS counts in 31 bits.
MOST = 2**30


def copy_each(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """`into[i] <- given[i]`, with one multi-tensor kernel for all pairs that can share one.

    A list with several dtypes, or with a single pair of different memory orders, would be copied tensor by tensor.
    """
    kinds: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(into, given, strict=True):
        alike = target.stride() == source.stride()
        kind = target.dtype, source.dtype, target.device, source.device, alike
        targets, sources = kinds.setdefault(kind, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Accumulated in float64, whatever the dtype of the terms; piece by piece, so that it needs little memory."""
    return _total(a, [(x * y).sum(dtype=torch.float64) for x, y in _pieces(a, b, PIECE)])


def quick_dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """In the precision of the terms, in one pass over them."""
    return _total(a, [torch.dot(x, y).double() for x, y in _pieces(a, b, MOST)])


def _pieces(a: Sequence[Tensor], b: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in zip(a, b, strict=True):
        yield from zip(x.flatten().split(size), y.flatten().split(size), strict=True)


def _total(like: Sequence[Tensor], sums: list[Tensor]) -> Tensor:
    return torch.stack([part.to(like[0].device) for part in sums]).sum()
