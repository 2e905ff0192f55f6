"""A metric of weights that FSDP2 has sharded: a rank has some rows of every gradient.

One all-to-all sends the rows to the owners of their blocks, and another one sends the rows of `U g` back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llqr.distributed.collectives import all_to_all
from llqr.distributed.dtensors import as_sharded, is_sharded, local
from llqr.distributed.placement import Group, Owned, Shards
from llqr.metric.layout import Block, copy_each
from llqr.metric.metric import Metric, Named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def check_fsdp(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Refuse sharded weights for which no metric can be learned: tensor parallelism, or only some weights sharded."""
    from torch.distributed.fsdp import FSDPModule

    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            raise ValueError(
                f"model: {name!r} is not sharded, but others are, and a metric needs all of them to be; let "
                "fully_shard take all parameters"
            )
    if not any(isinstance(module, FSDPModule) for module in model.modules()) or not _by_rows(parameters):
        raise ValueError(
            "model: its parameters are sharded otherwise than by FSDP2 (fully_shard) along their first dimension, as "
            "in tensor parallelism, and of such weights no metric can be learned; use a method without a geometry, "
            "such as llqr.SAM"
        )


def _by_rows(parameters: Mapping[str, Tensor]) -> bool:
    """Whether all are split by rows along the last dimension of one mesh, and copied along the others (HSDP)."""
    mesh = _mesh(parameters)
    for parameter in cast("list[DTensor]", list(parameters.values())):
        *others, last = parameter.placements
        if parameter.device_mesh != mesh or not last.is_shard(0) or not all(other.is_replicate() for other in others):
            return False
    return mesh.ndim <= 2


def _mesh(parameters: Mapping[str, Tensor]) -> DeviceMesh:
    return cast("DTensor", next(iter(parameters.values()))).device_mesh


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


def beside_shards(metric: Metric, parameters: Mapping[str, Tensor], shards: Shards) -> Sharded:
    """One copy of the metric for each copy of the model: a rank owns blocks of the one and has shards of the other."""
    mesh = _mesh(parameters)
    row = mesh.get_group(mesh.ndim - 1)
    count = dist.get_world_size(row)
    if shards not in ("all", count):
        raise ValueError(
            f"shards: the weights are split among {count} ranks, and so must the metric be; pass shards='all'"
        )
    column = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    whole = {
        name: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for name, p in parameters.items()
    }
    return Sharded(metric, whole, row, column)


@dataclass(frozen=True)
class Cut:
    """The rows of a block that are in one rank's shard of the parameter, and where they begin in block and shard."""

    block: Block
    rows: int
    in_block: int
    in_shard: int

    @classmethod
    def of(cls, block: Block, height: int, rank: int, ranks: int) -> Cut:
        """Of a parameter with so many rows: shards are chunks, the last of which may be shorter, or empty."""
        chunk = -(-height // ranks)
        start, stop = block.rows or (0, height)
        low, high = max(chunk * rank, start), min(chunk * (rank + 1), stop)
        return cls(block, max(0, high - low), low - start, low - chunk * rank)

    @property
    def size(self) -> int:
        return self.block.size // self.block.native[0] * self.rows

    def of_shard(self, shards: Mapping[str, Tensor]) -> Tensor | None:
        shard = shards.get(self.block.parameter)
        return None if shard is None else shard.narrow(0, self.in_shard, self.rows)

    def of_block(self, blocks: Mapping[str, Tensor]) -> Tensor | None:
        block = blocks.get(self.block.name)
        return None if block is None else block.narrow(0, self.in_block, self.rows)


class Sharded(Owned):
    """Blocks owned as in `Owned`, for gradients that are sharded by rows; `parameters` are outlines of whole ones."""

    def __init__(self, metric: Metric, parameters: Mapping[str, Tensor], row: Group, column: Group | None) -> None:
        super().__init__(metric, parameters, row, column)

        def cuts(rank: int, of: int) -> list[Cut]:
            """What a rank has of the blocks of an owner."""
            theirs = [block for block in metric.blocks if self._owner[block.name] == of]
            found = [Cut.of(block, parameters[block.parameter].shape[0], rank, self.shards) for block in theirs]
            return [cut for cut in found if cut.rows]

        self._to_owners = [cuts(self._shard, of) for of in range(self.shards)]
        self._from_ranks = [cuts(rank, self._shard) for rank in range(self.shards)]

    def to_owner(self, named: Mapping[str, Tensor]) -> Named:
        shards = _local(named)
        present = [block for block in self._own if block.parameter in named]
        received = self._exchanged(self._to_owners, self._from_ranks, lambda cut: cut.of_shard(shards), shards)
        own = {block.name: received.new_empty(block.native, device=block.device) for block in present}
        arrived, places = _pairs(received, self._from_ranks, lambda cut: cut.of_block(own))
        copy_each(places, arrived)
        return own

    def to_local(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        shards = _local(like)
        parts = {name: torch.empty_like(part) for name, part in shards.items()}
        received = self._exchanged(self._from_ranks, self._to_owners, lambda cut: cut.of_block(own), shards)
        arrived, places = _pairs(received, self._to_owners, lambda cut: cut.of_shard(parts))
        copy_each(places, arrived)
        return {name: as_sharded(parts[name], tensor) for name, tensor in like.items()}

    def _exchanged(
        self,
        sent: list[list[Cut]],
        received: list[list[Cut]],
        piece: Callable[[Cut], Tensor | None],
        like: Mapping[str, Tensor],
    ) -> Tensor:
        """What all ranks send here, one cut after the other; cuts without a piece are zero."""
        lengths, incoming_lengths = ([sum(cut.size for cut in some) for some in side] for side in (sent, received))
        outgoing = self._buffer(sum(lengths), like).zero_()
        copy_each(*_pairs(outgoing, sent, piece))
        incoming = outgoing.new_empty(sum(incoming_lengths))
        all_to_all(incoming, outgoing, incoming_lengths, lengths, self._row)
        return incoming


def _pairs(
    flat: Tensor, cuts: list[list[Cut]], piece: Callable[[Cut], Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """The places of the cuts in a flat tensor, one after the other, and their pieces, where they have one."""
    every = [cut for some in cuts for cut in some]
    rows = zip(flat.split([cut.size for cut in every]), map(piece, every), strict=True)
    found = [(place.view(given.shape), given) for place, given in rows if given is not None]
    return [place for place, _ in found], [given for _, given in found]


def _local(named: Mapping[str, Tensor]) -> Named:
    return dict(zip(named, local(list(named.values())), strict=True))
