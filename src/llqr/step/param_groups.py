"""What a probe reads from the groups of the base optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from llqr.schedule import check_number


def point_uphill(base: torch.optim.Optimizer, parameters: list[Tensor], eps: list[Tensor]) -> None:
    """Where the base maximises, worse is down: the displacement is reversed."""
    if any(group.get("maximize") for group in base.param_groups):
        reversed_ = {p for group in base.param_groups if group.get("maximize") for p in group["params"]}
        torch._foreach_neg_([part for p, part in zip(parameters, eps, strict=True) if p in reversed_])


def own_radius(base: torch.optim.Optimizer, parameters: list[Tensor]) -> list[float | None]:
    """The `"rho"` of each parameter's group, unless `rho` is a setting of the base optimizer (as in Adadelta)."""
    groups = base.param_groups
    if "rho" in base.defaults or not any("rho" in group for group in groups):
        return [None] * len(parameters)
    radius: dict[Tensor, float | None] = {}
    for i, group in enumerate(groups):
        rho = group.get("rho")
        own = None if rho is None else check_number(f"param_groups[{i}]['rho']", rho, 0)
        radius |= dict.fromkeys(group["params"], own)
    return [radius[p] for p in parameters]
