"""A metric that is shared out among ranks: every rank holds, learns and applies the blocks that it owns."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.distributed.collectives import all_gather, all_reduce, reduce_scatter
from llqr.distributed.dtensors import any_sharded
from llqr.metric.layout import Block, assembled, copy_each
from llqr.metric.metric import Metric, Named, Placement
from llqr.metric.structure import Structure

Group = dist.ProcessGroup
Shards = int | Literal["all"] | None

#: Blocks begin at multiples of so many entries in a buffer: multi-tensor kernels are slower on others.
ALIGNED = 8


def own_part(metric: Metric, parameters: Mapping[str, Tensor], shards: Shards, group: Group | None) -> Metric:
    """The part of a metric that this rank owns; the metric itself if it is not shared out."""
    if any_sharded(parameters.values()):
        from llqr.distributed.fsdp import beside_shards

        placement: Owned = beside_shards(metric, parameters, shards)
    else:
        count = shard_count(shards, group)
        if count == 1 or not metric.stored():
            return metric
        assert group is not None
        placement = Owned(metric, parameters, *_row_and_column(group, count))
    return metric.part(placement.names, placement)


def shard_count(shards: Shards, group: Group | None) -> int:
    """How many shards this means among the ranks of a group."""
    if shards is None:
        return 1
    if shards != "all" and (isinstance(shards, bool) or not isinstance(shards, int) or shards < 1):
        raise ValueError(f"shards: expected None, 'all' or a whole number of at least 1, got {shards!r}")
    if group is None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several or shards not in ("all", 1):
            raise ValueError(
                "shards: a metric is shared out among ranks that train one model, and none are known; pass the model "
                "wrapped in DDP, or Runtime(process_group=torch.distributed.group.WORLD)"
            )
        return 1
    ranks = dist.get_world_size(group)
    count = ranks if shards == "all" else shards
    if ranks % count:
        fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ValueError(f"shards: {count} do not divide the {ranks} ranks of the group; choose one of {fitting}")
    return count


def _row_and_column(group: Group, shards: int) -> tuple[Group, Group | None]:
    """The ranks that hold one copy of the metric with this one, and those that own the same blocks of other copies."""
    members = dist.get_process_group_ranks(group)
    copy, shard = divmod(dist.get_rank(group), shards)
    row, column = members[copy * shards : (copy + 1) * shards], members[shard::shards]
    return (
        group if len(row) == len(members) else dist.new_group(row, use_local_synchronization=True),
        dist.new_group(column, use_local_synchronization=True) if len(column) > 1 else None,
    )


def owners(groups: Sequence[Structure], shards: int) -> dict[str, int]:
    """Block name -> shard: the largest block first, each to the shard that holds least; allocates nothing.

    Loads are counted in stored scalars, and in entries of the gradient where these are equal. Every shard gets some
    factors, if there are any: a rank without could not take part in the inner loop.

    Example (the larger of two weights, and all the rest):
        >>> from torch import nn
        >>> from llqr import Metric
        >>> metric = Metric(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), structure="kfac")
        >>> owners(metric.groups, 2)
        {'0.weight': 0, '1.weight': 1, '0.bias': 1, '1.bias': 1}
    """
    pieces = [
        (type(group)(blocks).stored(), sum(block.size for block in blocks), blocks)
        for group in groups
        for blocks in group.inseparable()
    ]
    most = sum(stored > 0 for stored, _, _ in pieces)
    if 0 < most < shards:
        raise ValueError(
            f"shards: {shards} of them for a metric that can be taken apart into {most} pieces; choose at most {most}, "
            "or a structure that gives more layers factors"
        )
    pieces.sort(key=lambda piece: piece[:2], reverse=True)
    loads = [(0, 0)] * shards
    owner: dict[str, int] = {}
    for stored, entries, blocks in pieces:
        # Blocks without factors (the identity) weigh nothing but what travels.
        least = min(range(shards), key=lambda shard: loads[shard] if stored else loads[shard][1:])
        loads[least] = loads[least][0] + stored, loads[least][1] + entries
        owner |= {block.name: least for block in blocks}
    return owner


class Owned(Placement):
    """Blocks shared out among `shards` ranks; where a group has more, every `shards` consecutive ones hold a copy.

    Vectors travel in buffers with a segment of equal length for every shard. All blocks are in them, also those of
    parameters without a gradient, so that ranks always agree about the length.

    Args:
        metric: the whole one.
        parameters: by name; `to_whole` gives vectors in their layout.
        row: the ranks that hold one copy of the metric, each its shard.
        column: the owners of the same blocks, one in every copy; None if there is one copy.
    """

    def __init__(self, metric: Metric, parameters: Mapping[str, Tensor], row: Group, column: Group | None) -> None:
        self.shards, self._shard = dist.get_world_size(row), dist.get_rank(row)
        self._blocks, self._parameters, self._row, self._column = metric.blocks, parameters, row, column
        self._owner = owner = owners(metric.groups, self.shards)
        self._own = [block for block in metric.blocks if owner[block.name] == self._shard]
        self.names = [block.name for block in self._own]
        ends = [0] * self.shards
        self._offsets: dict[str, int] = {}  # of every block in its owner's segment
        for block in metric.blocks:
            self._offsets[block.name] = ends[owner[block.name]]
            ends[owner[block.name]] += -(-block.size // ALIGNED) * ALIGNED
        self._width = max(ends)

    def to_owner(self, named: Mapping[str, Tensor]) -> Named:
        return _pieces(self._own, named)

    def to_local(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        return assembled(self._blocks, self._gathered(own, like), like)

    def to_whole(self, own: Mapping[str, Tensor]) -> Named:
        """The parts of all owners on every rank, as a product with `H` needs them."""
        return assembled(self._blocks, self._gathered(own, self._parameters), self._parameters)

    def mean(self, named: Mapping[str, Tensor], weight: Tensor | None = None) -> Named:
        """The sum over all ranks of their own `weight * named`; every rank gets the part that it owns."""
        buffer = self._buffer(self.shards * self._width, named)
        _fill(self._views(buffer), _pieces(self._blocks, named))
        if weight is not None:
            buffer.mul_(weight.to(buffer))
        segment = buffer.new_empty(self._width)
        reduce_scatter(segment, buffer, self._row)
        if self._column is not None:
            all_reduce(segment, self._column)
        return self._own_views(segment)

    def total(self, numbers: Tensor) -> Tensor:
        """Added up in the order of the shards on every rank, so that they cannot drift apart."""
        every = numbers.new_empty(self.shards, *numbers.shape)
        all_gather(every.view(-1), numbers.contiguous().view(-1), self._row)
        return every.sum(0)

    def listed(self, names: Sequence[str], rows: Tensor) -> tuple[list[str], Tensor]:
        place = {block.name: i for i, block in enumerate(self._blocks)}
        every = rows.new_zeros(len(self._blocks), *rows.shape[1:])
        every[[place[name] for name in names]] = rows
        return [block.parameter for block in self._blocks], self.total(every)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Process groups cannot be copied, and need not be."""
        return self

    def _gathered(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        """The pieces of all blocks, from their owners."""
        buffer = self._buffer(self.shards * self._width, like)
        segment = buffer[self._shard * self._width : (self._shard + 1) * self._width]
        _fill(self._own_views(segment), own)
        all_gather(buffer, segment, self._row)
        return self._views(buffer)

    def _buffer(self, length: int, like: Mapping[str, Tensor]) -> Tensor:
        """In the widest dtype: parameters may have several, and gradients wider ones."""
        dtypes = [block.dtype for block in self._blocks] + [part.dtype for part in like.values()]
        return torch.empty(length, dtype=reduce(torch.promote_types, dtypes), device=self._blocks[0].device)

    def _views(self, buffer: Tensor) -> Named:
        """Every block's place in a buffer of all segments, in its native shape."""
        starts = [(b, self._owner[b.name] * self._width + self._offsets[b.name]) for b in self._blocks]
        return {b.name: buffer.as_strided(b.native, b.strides, start) for b, start in starts}

    def _own_views(self, segment: Tensor) -> Named:
        """The places of this rank's blocks in its segment."""
        starts = [(b, segment.storage_offset() + self._offsets[b.name]) for b in self._own]
        return {b.name: segment.as_strided(b.native, b.strides, start) for b, start in starts}


def _pieces(blocks: Sequence[Block], named: Mapping[str, Tensor]) -> Named:
    return {block.name: block.piece(named[block.parameter]) for block in blocks if block.parameter in named}


def _fill(places: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
    """Copy the pieces to their places; what has no piece is zero."""
    present = [name for name in places if name in pieces]
    copy_each([places[name] for name in present], [pieces[name] for name in present])
    for name in places.keys() - pieces.keys():
        places[name].zero_()
