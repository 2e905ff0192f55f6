"""Where the blocks of a metric live on the ranks that learn it together, and how vectors travel between these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.distributed.collectives import all_reduce

Named = dict[str, Tensor]


class Placement:
    """The whole metric on every rank, or in one process: each rank owns all of it.

    Gradients have names of parameters. What an owner holds has the names that its metric works with: here the same
    ones, and in `Owned`, where a metric is shared out, those of its own blocks.

    Args:
        group: the ranks that learn the metric together (default: this process alone).
    """

    #: Among how many ranks one copy of the metric is shared out.
    shards = 1

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def to_owner(self, named: Mapping[str, Tensor]) -> Named:
        """The part of a gradient that this rank's metric acts on. All ranks have the same gradient."""
        return dict(named)

    def to_local(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        """The parts of all owners, as this rank needs them in a step: for the parameters of `like`, in its layout."""
        return dict(own)

    def to_whole(self, own: Mapping[str, Tensor]) -> Named:
        """The parts of all owners on every rank, as a product with `H` needs them."""
        return dict(own)

    def mean(self, named: Mapping[str, Tensor], weight: Tensor | None = None) -> Named:
        """The sum over all ranks of their own `weight * named`; every rank gets the part that it owns."""
        if weight is not None:
            named = {name: part * weight.to(part) for name, part in named.items()}
        return dict(named) if self._group is None else summed(named, self._group)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over the owners of what each has for its own blocks; to the last bit the same on all ranks."""
        return numbers

    def listed(self, names: Sequence[str], rows: Tensor) -> tuple[list[str], Tensor]:
        """One row per name of this rank's metric -> the rows of all owners, with the parameter each belongs to."""
        return list(names), rows

    def __deepcopy__(self, memo: dict[int, object]) -> Placement:
        """Process groups cannot be copied, and need not be."""
        return self


def summed(named: Mapping[str, Tensor], group: dist.ProcessGroup) -> Named:
    """The sum over the ranks, in one collective per dtype."""
    total: Named = {}
    for dtype in dict.fromkeys(part.dtype for part in named.values()):
        own = {name: part for name, part in named.items() if part.dtype == dtype}
        flat = torch.cat([part.reshape(-1) for part in own.values()])
        all_reduce(flat, group)
        parts = flat.split([part.numel() for part in own.values()])
        total |= {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}
    return {name: total[name] for name in named}
