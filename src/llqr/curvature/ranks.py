"""Quadratic models averaged over the ranks of `torch.distributed`, so that every rank learns the same metric."""

from __future__ import annotations

import torch
import torch.distributed as dist

from llqr.curvature.quadratic import Named, QuadraticModel


def averaged_over_ranks(local: QuadraticModel, group: dist.ProcessGroup | None = None) -> QuadraticModel:
    """Loss, gradients and products, each the mean over all ranks."""

    def mean(named: Named) -> Named:
        flat = torch.cat([part.reshape(-1) for part in named.values()])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = flat.split([part.numel() for part in named.values()])
        return {name: part.view_as(named[name]).to(named[name].dtype) for name, part in zip(named, parts, strict=True)}

    loss = mean({"loss": local.loss})["loss"]
    gradients = tuple(mean(share) for share in local.gradients)
    return QuadraticModel(loss, mean(local.gradient), lambda v: mean(local.product(v)), gradients)


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
