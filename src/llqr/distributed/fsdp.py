"""What a geometry needs to know of a model that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llqr.distributed.dtensors import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def check_fsdp(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Refuse sharded weights for which no metric can be learned: tensor parallelism, or only some weights sharded."""
    from torch.distributed.fsdp import FSDPModule

    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            raise ValueError(
                f"model: {name!r} is not sharded and others are, of which no metric can be learned; let fully_shard "
                "take all parameters"
            )
    if not any(isinstance(module, FSDPModule) for module in model.modules()) or not _by_fsdp(parameters):
        raise ValueError(
            "model: its parameters are sharded otherwise than by FSDP2 (fully_shard) alone, as in tensor parallelism, "
            "and of such weights no metric can be learned; use a method without a geometry, such as llqr.SAM"
        )


def _by_fsdp(parameters: Mapping[str, Tensor]) -> bool:
    """Whether all are split along the last dimension of one mesh, and copied along the others (HSDP)."""
    mesh = _mesh(parameters)
    for parameter in cast("list[DTensor]", list(parameters.values())):
        *others, last = parameter.placements
        if parameter.device_mesh != mesh or not last.is_shard() or not all(other.is_replicate() for other in others):
            return False
    return mesh.ndim <= 2


def _mesh(parameters: Mapping[str, Tensor]) -> DeviceMesh:
    first = cast("DTensor", next(iter(parameters.values())))
    return first.device_mesh


def fsdp_groups(parameters: Mapping[str, Tensor]) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The ranks that the weights are split among, and those that hold copies of this rank's shards."""
    mesh = _mesh(parameters)
    copies = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    return mesh.get_group(mesh.ndim - 1), copies


def fsdp_group(parameters: Mapping[str, Tensor]) -> dist.ProcessGroup:
    """All ranks that train the model."""
    mesh = _mesh(parameters)
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


def split_dim(parameter: Tensor) -> int:
    """The dimension along which a parameter is split."""
    placement = cast("DTensor", parameter).placements[-1]
    return int(placement.dim)  # type: ignore[attr-defined]  # a Shard, see `check_fsdp`


def outlines(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without memory in the shapes of the whole parameters."""
    return {
        name: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for name, p in parameters.items()
    }
