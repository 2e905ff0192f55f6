"""Copies of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
