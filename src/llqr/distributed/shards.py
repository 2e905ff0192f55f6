"""Among how many ranks a metric is shared out, and which part of it is this rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from llqr.distributed.dtensors import any_sharded
from llqr.distributed.fsdp import fsdp_groups, outlines, split_dim
from llqr.distributed.owned import Owned
from llqr.distributed.owners import owners
from llqr.distributed.sharded import Sharded
from llqr.metric import Metric

Shards = int | Literal["all"] | None


def own_part(
    metric: Metric, parameters: Mapping[str, Tensor], shards: Shards, group: dist.ProcessGroup | None
) -> Metric:
    """The part of a metric that this rank owns; the metric itself if it is not shared out."""
    if any_sharded(parameters.values()):
        return _beside_shards(metric, parameters, shards)
    count = shard_count(shards, group)
    if count == 1 or not metric.stored():
        return metric
    assert group is not None
    placement = Owned(metric.blocks, owners(metric.groups, count), parameters, *_row_and_column(group, count))
    return metric.part(placement.names, placement)


def _row_and_column(group: dist.ProcessGroup, shards: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The ranks that hold one copy of the metric with this one, and those that own the same blocks of other copies."""
    members = dist.get_process_group_ranks(group)
    copy, shard = divmod(dist.get_rank(group), shards)
    row, column = members[copy * shards : (copy + 1) * shards], members[shard::shards]
    return (
        group if len(row) == len(members) else dist.new_group(row, use_local_synchronization=True),
        dist.new_group(column, use_local_synchronization=True) if len(column) > 1 else None,
    )


def _beside_shards(metric: Metric, parameters: Mapping[str, Tensor], shards: Shards) -> Metric:
    """The part of a rank that has shards of the weights too: one copy of the metric for each copy of the model."""
    row, column = fsdp_groups(parameters)
    count = dist.get_world_size(row)
    if shards not in ("all", count):
        raise ValueError(
            f"shards: the weights are split among {count} ranks, and so must the metric be; pass shards='all'"
        )
    dims = {name: split_dim(parameter) for name, parameter in parameters.items()}
    placement = Sharded(metric.blocks, owners(metric.groups, count), outlines(parameters), row, column, dims)
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
