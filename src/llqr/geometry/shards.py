"""Among how many ranks a metric is shared out, and which part of it is this rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from llqr.metric import Metric
from llqr.metric.owned import Owned
from llqr.metric.owners import owners

Shards = int | Literal["all"] | None


def own_part(
    metric: Metric, parameters: Mapping[str, Tensor], shards: Shards, group: dist.ProcessGroup | None
) -> Metric:
    """The part of a metric that this rank owns; the metric itself if it is not shared out."""
    count = shard_count(shards, group)
    if count == 1 or not metric.stored():
        return metric
    assert group is not None
    placement = Owned(metric.blocks, owners(metric.groups, count), parameters, group)
    return metric.part(placement.names, placement)


def shard_count(shards: Shards, group: dist.ProcessGroup | None) -> int:
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
