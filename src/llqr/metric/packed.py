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
#: A tensor of fewer entries takes longer to launch a kernel for than to compute.
SMALL = 2**20


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


def joined(parts: Packed) -> Packed:
    """The same vector with small parts put together, so that fewer kernels are launched for each operation on it."""
    bundles = [[parts[i] for i in bundle] for bundle in _bundles(parts)]
    return [own[0].flatten() if len(own) == 1 else torch.cat([part.flatten() for part in own]) for own in bundles]


def parted(bundles: Packed, like: Packed) -> Packed:
    """The inverse of `joined`: views in the shapes of `like`."""
    found: dict[int, Tensor] = {}
    for joint, bundle in zip(bundles, _bundles(like), strict=True):
        for i, part in zip(bundle, joint.split([like[i].numel() for i in bundle]), strict=True):
            found[i] = part.view(like[i].shape)
    return [found[i] for i in range(len(like))]


def _bundles(parts: Packed) -> list[list[int]]:
    """Which parts are put together, by their places."""
    bundles: dict[object, list[int]] = {}
    for i, part in enumerate(parts):
        bundles.setdefault((part.device, part.dtype) if part.numel() < SMALL else i, []).append(i)
    return list(bundles.values())


def _pieces(a: Sequence[Tensor], b: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in zip(a, b, strict=True):
        yield from zip(x.flatten().split(size), y.flatten().split(size), strict=True)


def _total(like: Sequence[Tensor], sums: list[Tensor]) -> Tensor:
    return torch.stack([part.to(like[0].device) for part in sums]).sum()
