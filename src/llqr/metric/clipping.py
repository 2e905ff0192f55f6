"""The bound on the factors' gradients, for all groups at once: one multi-tensor norm, one multiplication per factor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Structure


def clip(groups: Sequence[Structure], gradients: Sequence[Factors], limit: float) -> list[Factors]:
    """Bound the norm of every unit (a block's factor, a layer of a diagonal) by `limit`.

    The norms are computed in at least float32, and so is the result.
    """
    units = [group.units(own) if own else [] for group, own in zip(groups, gradients, strict=True)]
    norms = _norms([unit for own in units for unit in own])
    shrink = (norms / max(limit, torch.finfo(norms.dtype).tiny)).clamp_min(1.0).reciprocal()
    clipped = []
    for group, own, numbers in zip(groups, gradients, shrink.split([len(own) for own in units]), strict=True):
        if own:
            like = next(iter(own.values()))
            numbers = numbers.to(like.device, torch.promote_types(like.dtype, torch.float32))
        clipped.append(group.scaled(own, numbers) if own else {})
    return clipped


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norms as one vector, on the device of the first tensor."""
    home = tensors[0].device
    norms: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # a multi-tensor kernel takes one dtype at a time
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        norms |= dict(zip(places, torch._foreach_norm([tensors[i] for i in places], 2, wide), strict=True))
    return torch.stack([norms[i].to(home) for i in range(len(tensors))])
