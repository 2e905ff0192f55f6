"""A metric that is shared out among ranks which have shards of the gradients (FSDP2, HSDP)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.distributed.collectives import all_to_all
from llqr.distributed.dtensors import as_sharded, local
from llqr.distributed.owned import Owned, by_kind, travelling_dtype
from llqr.distributed.placement import Named
from llqr.metric.block import Block
from llqr.metric.copying import copy_each


@dataclass(frozen=True)
class Cut:
    """What one rank's shard of a parameter has of a block: a range of one dimension.

    Attributes:
        dim: along which the parameter is split. If it is not the first, a shard has all rows, also of other blocks.
        in_block, in_shard: where the range begins.
    """

    block: Block
    dim: int
    in_block: int
    in_shard: int
    length: int

    @property
    def size(self) -> int:
        return self.block.size // self.block.native[self.dim] * self.length

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.block.native[: self.dim], self.length, *self.block.native[self.dim + 1 :])

    def of_shard(self, shard: Tensor) -> Tensor:
        """As a view of the shard."""
        rows = shard if self.dim == 0 else self.block.piece(shard)
        return rows.narrow(self.dim, self.in_shard, self.length)

    def of_block(self, block: Tensor) -> Tensor:
        """As a view of the block."""
        return block.narrow(self.dim, self.in_block, self.length)


@dataclass(frozen=True)
class Route:
    """The blocks of one dtype and device, and what travels of them.

    Attributes:
        own: this rank's.
        sent: for every shard, what this rank has of the blocks of that owner.
        received: for every rank, what it has of this rank's blocks.
    """

    blocks: tuple[Block, ...]
    own: tuple[Block, ...]
    sent: tuple[tuple[Cut, ...], ...]
    received: tuple[tuple[Cut, ...], ...]


class Sharded(Owned):
    """Blocks owned as in `Owned`; gradients come as shards, one range of a dimension of a parameter for every rank.

    Shards travel to the owners of their blocks, and what these make of them travels back, by one all-to-all each.

    Args:
        dims: the dimension along which each parameter is split, by name, in equal parts but the last ones.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        owner: Mapping[str, int],
        parameters: Mapping[str, Tensor],
        row: dist.ProcessGroup,
        column: dist.ProcessGroup | None,
        dims: Mapping[str, int],
    ) -> None:
        super().__init__(blocks, owner, parameters, row, column)
        self._routes = list(_routes(blocks, owner, parameters, dims, self.shards, self._shard))

    def to_owner(self, named: Mapping[str, Tensor]) -> Named:
        shards = dict(zip(named, local(list(named.values())), strict=True))
        own: Named = {}
        for route in self._routes:
            pieces = [
                cut.of_shard(shards[cut.block.parameter]) if cut.block.parameter in shards else None
                for cuts in route.sent
                for cut in cuts
            ]
            received = self._exchanged(route, pieces, route.sent, route.received, shards)
            blocks = {block.name: received.new_empty(block.native) for block in route.own}
            cuts = [cut for cuts in route.received for cut in cuts]
            copy_each([cut.of_block(blocks[cut.block.name]) for cut in cuts], _split(received, cuts))
            present = {block.name for block in route.own if block.parameter in named}
            own |= {name: block for name, block in blocks.items() if name in present}
        return own

    def to_local(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        shards = dict(zip(like, local(list(like.values())), strict=True))
        parts: Named = {}
        for route in self._routes:
            pieces = [
                cut.of_block(own[cut.block.name]) if cut.block.name in own else None
                for cuts in route.received
                for cut in cuts
            ]
            received = self._exchanged(route, pieces, route.received, route.sent, shards)
            cuts = [cut for cuts in route.sent for cut in cuts]
            names = dict.fromkeys(cut.block.parameter for cut in cuts if cut.block.parameter in like)
            parts |= {name: torch.empty_like(shards[name]) for name in names}
            pairs = [
                (cut.of_shard(parts[cut.block.parameter]), piece)
                for cut, piece in zip(cuts, _split(received, cuts), strict=True)
                if cut.block.parameter in parts
            ]
            copy_each([place for place, _ in pairs], [piece for _, piece in pairs])
        return {name: as_sharded(parts.get(name, shards[name]), tensor) for name, tensor in like.items()}

    def _exchanged(
        self,
        route: Route,
        pieces: Sequence[Tensor | None],
        sent: Sequence[Sequence[Cut]],
        received: Sequence[Sequence[Cut]],
        like: Mapping[str, Tensor],
    ) -> Tensor:
        """The pieces that all ranks send here, one after the other; what has no piece is zero."""
        cuts = [cut for some in sent for cut in some]
        incoming_lengths, lengths = ([sum(cut.size for cut in some) for some in side] for side in (received, sent))
        outgoing = torch.zeros(sum(lengths), dtype=travelling_dtype(route.blocks, like), device=route.blocks[0].device)
        filled = [(to, piece) for to, piece in zip(_split(outgoing, cuts), pieces, strict=True) if piece is not None]
        copy_each([place for place, _ in filled], [piece for _, piece in filled])
        incoming = outgoing.new_empty(sum(incoming_lengths))
        all_to_all(incoming, outgoing, incoming_lengths, lengths, self._row)
        return incoming


def _routes(
    blocks: Sequence[Block],
    owner: Mapping[str, int],
    parameters: Mapping[str, Tensor],
    dims: Mapping[str, int],
    shards: int,
    this: int,
) -> Iterator[Route]:
    def cuts(alike: Sequence[Block], rank: int, of: int) -> tuple[Cut, ...]:
        theirs = [block for block in alike if owner[block.name] == of]
        found = (_cut(b, dims[b.parameter], parameters[b.parameter].shape, rank, shards) for b in theirs)
        return tuple(cut for cut in found if cut.length)

    for alike in by_kind(blocks):
        yield Route(
            tuple(alike),
            tuple(block for block in alike if owner[block.name] == this),
            tuple(cuts(alike, this, of) for of in range(shards)),
            tuple(cuts(alike, rank, this) for rank in range(shards)),
        )


def _cut(block: Block, dim: int, shape: Sequence[int], rank: int, ranks: int) -> Cut:
    """What this rank's shard has of a block: shards are chunks, the last of which may be shorter, or empty."""
    chunk = -(-shape[dim] // ranks)
    first, end = (min(chunk * i, shape[dim]) for i in (rank, rank + 1))
    start, stop = (0, shape[dim]) if dim or block.rows is None else block.rows
    low, high = max(first, start), min(end, stop)
    length = max(0, high - low)
    return Cut(block, dim, low - start if length else 0, low - first if length else 0, length)


def _split(flat: Tensor, cuts: Sequence[Cut]) -> list[Tensor]:
    return [part.view(cut.shape) for part, cut in zip(flat.split([cut.size for cut in cuts]), cuts, strict=True)]
