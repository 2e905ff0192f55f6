"""Collectives of tensors on any device: each is sent from a device that its process group communicates on.

NCCL takes CUDA tensors only, while losses, counts and offloaded weights may be on the host. They go through the rank's
current device, as in torch's own object collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, largest: bool = False) -> None:
    """The sum over all ranks, or the largest of their numbers, in place."""
    carried = tensor.to(carrier(tensor, group))
    dist.all_reduce(carried, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    if carried is not tensor:
        tensor.copy_(carried)


def all_gather(into: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather `own` of all ranks, in their order; `own` may be this rank's place in `into`."""
    # torch 2.13 has new names for these, and warns of the old ones.
    _carried(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor, into, own, group)


def reduce_scatter(own: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum over all ranks of `given`."""
    _carried(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, own, given, group)


def all_to_all(
    into: Tensor, given: Tensor, into_lengths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup
) -> None:
    """Send `lengths[i]` entries of `given` to rank `i`, and receive `into_lengths[i]` entries of `into` from it."""
    _carried(dist.all_to_all_single, into, given, group, into_lengths, lengths)


def carrier(tensor: Tensor, group: dist.ProcessGroup) -> torch.device:
    """The device that a tensor is sent from: its own, if the group has a backend for it."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return tensor.device if tensor.device.type in kinds else torch.device(kinds[0])


def _carried(
    collective: Callable[..., Any], into: Tensor, given: Tensor, group: dist.ProcessGroup, *lengths: Any
) -> None:
    device = carrier(into, group)
    carried = into if into.device == device else torch.empty_like(into, device=device)
    collective(carried, given.to(device), *lengths, group=group)
    if carried is not into:
        into.copy_(carried)
