"""The bound on the factors' gradients, for all groups at once: one multi-tensor norm, one multiplication per factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from llqr.metric.structure import Factors, Structure

Each = Sequence[Callable[[], Factors]]


def in_order(each: Each) -> list[Factors]:
    return [compute() for compute in each]


def clip(
    groups: Sequence[Structure],
    gradients: Sequence[Factors],
    limit: float,
    run: Callable[[Each], list[Factors]] = in_order,
) -> list[Factors]:
    """Bound the norm of every unit (a block's factor, a layer of a diagonal) by `limit`.

    The norms are computed in at least float32, and so is the result. `run` calls a function for every group.
    """
    units = [group.units(own) if own else [] for group, own in zip(groups, gradients, strict=True)]
    norms = _norms([unit for own in units for unit in own])
    shrink = (norms / max(limit, torch.finfo(norms.dtype).tiny)).clamp_min(1.0).reciprocal()
    numbers = shrink.split([len(own) for own in units])
    return run([partial(_scaled, *own) for own in zip(groups, gradients, numbers, strict=True)])


def _scaled(group: Structure, own: Factors, numbers: Tensor) -> Factors:
    if not own:
        return {}
    like = next(iter(own.values()))
    return group.scaled(own, numbers.to(like.device, torch.promote_types(like.dtype, torch.float32)))


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norms as one vector, on the device of the first tensor."""
    home = tensors[0].device
    norms: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # a multi-tensor kernel takes one dtype at a time
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        norms |= dict(zip(places, torch._foreach_norm([tensors[i] for i in places], 2, wide), strict=True))
    return torch.stack([norms[i].to(home) for i in range(len(tensors))])
