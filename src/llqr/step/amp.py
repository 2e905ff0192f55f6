"""torch's `GradScaler` across the two passes of a step, for which it was not designed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState


def centre_gradients(scaler: Any, optimizers: tuple[torch.optim.Optimizer, ...], grads: list[Tensor]) -> list[Tensor]:
    """The first pass's gradients without the loss scale.

    The caller may have called `unscale_` (to clip) on any of the `optimizers`, which share their parameters. The scaler
    must then forget that, because the second pass produces scaled gradients again.
    """
    if scaler is None or not scaler.is_enabled():
        return grads
    states = scaler._per_optimizer_states
    if any(_unscaled(scaler, optimizer) for optimizer in optimizers):
        for optimizer in optimizers:
            states.pop(id(optimizer), None)
        return grads
    return list(torch._foreach_mul(grads, 1.0 / scaler.get_scale()))


def overflowed(scaler: Any, grads: list[Tensor]) -> bool:
    """Whether any gradient is infinite or NaN; checked only with a scaler, where this is an ordinary event."""
    if scaler is None or not scaler.is_enabled():
        return False
    sizes = torch._foreach_norm(grads, float("inf"))
    return not torch.stack([size.to(sizes[0].device, torch.float32) for size in sizes]).isfinite().all().item()


def unscale_once(scaler: Any, wrapper: torch.optim.Optimizer, base: torch.optim.Optimizer) -> None:
    """`scaler.unscale_(base)`, unless the caller has already done so, for either of the two, in order to clip."""
    if not scaler.is_enabled():
        return
    if _unscaled(scaler, wrapper):
        # Both have the same gradients, so what the scaler found in them holds for the base as well.
        scaler._per_optimizer_states[id(base)] = scaler._per_optimizer_states[id(wrapper)]
    elif not _unscaled(scaler, base):
        scaler.unscale_(base)


def _unscaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    states = scaler._per_optimizer_states
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED
