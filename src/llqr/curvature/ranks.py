"""A curvature averaged over the ranks of `torch.distributed`, so that every rank learns the same metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.curvature.engines import Named


class QuadraticModel(Protocol):
    """What the inner solver needs to know of a curvature."""

    loss: Tensor
    gradient: Named

    def product(self, v: Mapping[str, Tensor]) -> Named: ...


class RankAverage:
    """Loss, gradient and products, each the mean over all ranks."""

    def __init__(self, local: QuadraticModel, group: dist.ProcessGroup | None = None) -> None:
        self._local = local
        self._group = group
        self.loss = self._mean({"loss": local.loss})["loss"]
        self.gradient = self._mean(local.gradient)

    def product(self, v: Mapping[str, Tensor]) -> Named:
        return self._mean(self._local.product(v))

    def _mean(self, local: Named) -> Named:
        flat = torch.cat([part.reshape(-1) for part in local.values()])
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)
        parts = flat.split([part.numel() for part in local.values()])
        return {name: part.view_as(local[name]).to(local[name].dtype) for name, part in zip(local, parts, strict=True)}


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
