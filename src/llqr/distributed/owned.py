"""A metric that is shared out: every rank holds, learns and applies the blocks that it owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.distributed.assembled import assembled
from llqr.distributed.collectives import all_gather, all_reduce, reduce_scatter
from llqr.distributed.placement import Named, Placement
from llqr.metric.block import Block
from llqr.metric.copying import copy_each

#: Blocks begin at multiples of so many bytes in a buffer: multi-tensor kernels are slower on others.
ALIGNED = 16


@dataclass(frozen=True)
class Lane:
    """The blocks of one dtype and device in one buffer: a segment of equal length for every shard.

    Attributes:
        shards: the owner of each block.
        offsets: where each block begins in its owner's segment.
        width: of a segment.
    """

    blocks: tuple[Block, ...]
    shards: tuple[int, ...]
    offsets: tuple[int, ...]
    width: int

    def views(self, buffer: Tensor) -> Named:
        """Every block's place in a buffer of all segments, in its native shape."""
        rows = zip(self.blocks, self.shards, self.offsets, strict=True)
        return {b.name: buffer.as_strided(b.native, b.strides, s * self.width + offset) for b, s, offset in rows}

    def own_views(self, segment: Tensor, shard: int) -> Named:
        """The places of this shard's blocks in its segment."""
        rows = zip(self.blocks, self.shards, self.offsets, strict=True)
        start = segment.storage_offset()
        return {b.name: segment.as_strided(b.native, b.strides, start + at) for b, s, at in rows if s == shard}


class Owned(Placement):
    """Blocks shared out among `shards` ranks; where a group has more, every `shards` consecutive ones hold a copy.

    An owner's vectors have the names of its blocks. The buffers that travel have all blocks in them, also of parameters
    without a gradient, so that ranks always agree about their length.

    Args:
        blocks: of the whole metric.
        owner: block name -> shard.
        parameters: by name; `to_whole` gives vectors in their layout.
        row: the ranks that hold one copy of the metric, each its shard.
        column: the owners of the same blocks, one in every copy; None if there is one copy.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        owner: Mapping[str, int],
        parameters: Mapping[str, Tensor],
        row: dist.ProcessGroup,
        column: dist.ProcessGroup | None,
    ) -> None:
        self.shards, self._shard = dist.get_world_size(row), dist.get_rank(row)
        self._blocks, self._parameters = tuple(blocks), parameters
        self._row, self._column = row, column
        self._own = [block for block in blocks if owner[block.name] == self._shard]
        self._lanes = list(_lanes(blocks, owner, self.shards))

    @property
    def names(self) -> list[str]:
        """Of the blocks that this rank owns."""
        return [block.name for block in self._own]

    @property
    def buffer_lengths(self) -> list[int]:
        """Entries of the buffers that travel, one for every dtype and device."""
        return [self.shards * lane.width for lane in self._lanes]

    @property
    def buffer_bytes(self) -> int:
        """Of all of them, for vectors in the parameters' dtypes."""
        return sum(self.shards * lane.width * lane.blocks[0].dtype.itemsize for lane in self._lanes)

    def to_owner(self, named: Mapping[str, Tensor]) -> Named:
        return _pieces(self._own, named)

    def to_local(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        return dict(like) | assembled(self._blocks, self._gathered(own, like), like)

    def to_whole(self, own: Mapping[str, Tensor]) -> Named:
        return assembled(self._blocks, self._gathered(own, self._parameters), self._parameters)

    def mean(self, named: Mapping[str, Tensor], weight: Tensor | None = None) -> Named:
        own: Named = {}
        for lane in self._lanes:
            buffer = self._buffer(lane, named)
            _fill(lane.views(buffer), _pieces(lane.blocks, named))
            if weight is not None:
                buffer.mul_(weight.to(buffer))
            segment = buffer.new_empty(lane.width)
            reduce_scatter(segment, buffer, self._row)
            if self._column is not None:
                all_reduce(segment, self._column)
            own |= lane.own_views(segment, self._shard)
        return own

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

    def _gathered(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        """The pieces of all blocks, from their owners."""
        pieces: Named = {}
        for lane in self._lanes:
            buffer = self._buffer(lane, like)
            segment = buffer[self._shard * lane.width : (self._shard + 1) * lane.width]
            _fill(lane.own_views(segment, self._shard), own)
            all_gather(buffer, segment, self._row)
            pieces |= lane.views(buffer)
        return pieces

    def _buffer(self, lane: Lane, like: Mapping[str, Tensor]) -> Tensor:
        dtype, device = travelling_dtype(lane.blocks, like), lane.blocks[0].device
        return torch.empty(self.shards * lane.width, dtype=dtype, device=device)


def travelling_dtype(blocks: Sequence[Block], like: Mapping[str, Tensor]) -> torch.dtype:
    """Of what travels: gradients may be wider than their parameters."""
    given = {like[block.parameter].dtype for block in blocks if block.parameter in like}
    return reduce(torch.promote_types, given) if given else blocks[0].dtype


def by_kind(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of one dtype and device, which can travel together."""
    kinds: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        kinds.setdefault((block.dtype, block.device), []).append(block)
    return list(kinds.values())


def _lanes(blocks: Sequence[Block], owner: Mapping[str, int], shards: int) -> Iterator[Lane]:
    for alike in by_kind(blocks):
        step = max(1, ALIGNED // alike[0].dtype.itemsize)
        ends, offsets = [0] * shards, []
        for block in alike:
            shard = owner[block.name]
            offsets.append(ends[shard])
            ends[shard] += -(-block.size // step) * step
        yield Lane(tuple(alike), tuple(owner[block.name] for block in alike), tuple(offsets), max(ends))


def _pieces(blocks: Sequence[Block], named: Mapping[str, Tensor]) -> Named:
    return {block.name: block.piece(named[block.parameter]) for block in blocks if block.parameter in named}


def _fill(places: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
    """Copy the pieces to their places; what has no piece is zero."""
    present = [name for name in places if name in pieces]
    copy_each([places[name] for name in present], [pieces[name] for name in present])
    for name in places.keys() - pieces.keys():
        places[name].zero_()
