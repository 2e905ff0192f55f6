"""Parameters of which a rank holds a part: the DTensors of FSDP2, HSDP and tensor parallelism.

A step acts on the local parts, which is as fast as without shards; only norms need the other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llqr.distributed.collectives import all_reduce

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _dtensor() -> type[DTensor] | None:
    """The class, if anything has imported it. Otherwise there are no DTensors, and importing it is slow."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    if type(tensor) is Tensor:  # nearly always, where time matters
        return False
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Checks each type once, because a step calls this for all its tensors several times."""
    kind = _dtensor()
    return kind is not None and any(issubclass(own, kind) for own in set(map(type, tensors)))


def refuse_fsdp1(parameters: Iterable[Tensor]) -> None:
    wrapped = "torch.distributed.fsdp" in sys.modules
    if wrapped and any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise TypeError(
            "parameters: FSDP1 (FullyShardedDataParallel) hides which weights a rank holds, so that no norm of them is "
            "right; shard the model with torch.distributed.fsdp.fully_shard (FSDP2), or use DDP"
        )


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts, without a copy; tensors that are not sharded are their own part."""
    if not any_sharded(tensors):  # a step asks often
        return list(tensors)
    with torch.no_grad():
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


@torch.no_grad()
def as_sharded(part: Tensor, parameter: Tensor) -> Tensor:
    """A local part as a tensor sharded like the parameter; itself if the parameter is not sharded."""
    if not is_sharded(parameter):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return type(parameter).from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def sharded_like(parameters: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradients with the placements of their parameters; backward may give them as partial sums, or replicated."""
    with torch.no_grad():
        return [
            g.redistribute(p.device_mesh, p.placements)
            if is_sharded(p) and is_sharded(g) and g.placements != p.placements
            else g
            for p, g in zip(parameters, grads, strict=True)
        ]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All parts of a sharded tensor together, on every rank."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def local_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor once it is sharded like the parameter; it may be whole, or sharded otherwise."""
    if not is_sharded(parameter):
        return whole(tensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    if is_sharded(tensor) and tensor.device_mesh == mesh:
        return tensor.redistribute(mesh, placements).to_local()
    from torch.distributed.tensor import Replicate

    replicated = type(parameter).from_local(whole(tensor), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, placements).to_local()


def drop_gathered(modules: Iterable[nn.Module]) -> None:
    """Reshard the modules in which FSDP2 has kept the gathered weights."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        for module in modules:
            if isinstance(module, kind):
                module.reshard()


class Sharding:
    """Which ranks hold the other parts of each parameter.

    Attributes:
        kinds: the places of the parameters that are split among the same ranks.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        members: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for place, parameter in enumerate(parameters):
            members.setdefault(_groups(parameter), []).append(place)
        self.kinds = list(members.values())
        self._groups = list(members)
        self._every_group = list(dict.fromkeys(chain.from_iterable(members)))

    def sums(self, measure: Callable[..., Tensor], *lists: Sequence[Tensor]) -> list[Tensor]:
        """`measure` of the local parts of each kind of parameters, summed over the ranks that these are split among.

        One collective for each dimension of the mesh that splits any of them.
        """
        parts = [measure(*([own[place] for place in places] for own in lists)) for places in self.kinds]
        for group in self._every_group:
            split = [i for i, groups in enumerate(self._groups) if group in groups]
            joined = torch.cat([parts[i].reshape(-1).to(parts[split[0]].device) for i in split])
            all_reduce(joined, group)
            for i, total in zip(split, joined.split([parts[i].numel() for i in split]), strict=True):
                parts[i] = total.view_as(parts[i])
        return parts

    def joined(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Local parts as sharded tensors."""
        return [as_sharded(part, parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of tensors beside the parameters; those of other shapes, such as numbers, are whole."""
        return [
            local_like(tensor, parameter) if tensor.shape == parameter.shape else whole(tensor)
            for tensor, parameter in zip(tensors, self._parameters, strict=True)
        ]


def _groups(parameter: Any) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that a parameter is split among; none if it is whole."""
    if not is_sharded(parameter):
        return ()
    mesh = parameter.device_mesh
    # Asked like this because the placement of FSDP2 with tensor parallelism, _StridedShard, is no subclass of Shard.
    split = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(i) for i in split)
