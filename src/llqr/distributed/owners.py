"""Which shard owns which block: the largest first, each to the shard that holds least."""

from __future__ import annotations

from collections.abc import Sequence

from llqr.metric.structure import Structure


def owners(groups: Sequence[Structure], shards: int) -> dict[str, int]:
    """Block name -> shard; nothing is allocated, so that metrics on the meta device can be planned.

    Loads are counted in stored scalars, and in entries of the gradient where these are equal. Every shard gets some
    factors: a rank without any could not take part in the inner loop.

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
    if most < shards:
        raise ValueError(
            f"shards: {shards} of them for a metric that can be taken apart into {most} pieces; choose at most {most}"
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
