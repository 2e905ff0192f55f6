"""torch's `GradScaler` across the two passes of a step, for which it was not designed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from llqr.distributed.dtensors import Sharding


class ScaledByAttributes:
    """A scaler that shows itself only by the attributes `grad_scale` and `found_inf` of the optimizer that it steps.

    It has looked at the gradients that are there, so that there can be no closure; and it cannot be told of others.
    """

    def __init__(self, grad_scale: Tensor | float | None, found_inf: Tensor | float) -> None:
        self._scale, self._found_inf = grad_scale, found_inf

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return 1.0 if self._scale is None else float(self._scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scale is not None:
            scale = self._scale
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device) if isinstance(scale, Tensor) else scale)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not float(self._found_inf):
            optimizer.step()


def scaler_of(optimizer: torch.optim.Optimizer, *, has_closure: bool) -> ScaledByAttributes | None:
    """What a scaler has written on the optimizer, if one has; refused if a closure is to compute other gradients."""
    own = optimizer.__dict__
    if "found_inf" not in own:
        return None
    if has_closure:
        raise ValueError(
            "grad_scaler: this scaler has looked for overflows before the closure computes gradients; "
            "call opt.step(closure, grad_scaler=scaler)"
        )
    return ScaledByAttributes(own["grad_scale"], own["found_inf"])


def start_again(scaler: Any, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Before a closure computes new gradients: what the scaler has found in the ones that are there does not count."""
    if not isinstance(scaler, GradScaler) or not scaler.is_enabled():
        return
    for optimizer in optimizers:
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is not OptState.STEPPED:
            state |= {"stage": OptState.READY, "found_inf_per_device": {}}


def centre_gradients(scaler: Any, optimizers: tuple[torch.optim.Optimizer, ...], grads: list[Tensor]) -> list[Tensor]:
    """The first pass's gradients without the loss scale.

    The caller may have called `unscale_` (to clip) on any of the `optimizers`, which share their parameters. The scaler
    must then forget that, because the second pass produces scaled gradients again.
    """
    if scaler is None or not scaler.is_enabled():
        return grads
    if any(_unscaled(scaler, optimizer) for optimizer in optimizers):
        for optimizer in optimizers:
            scaler._per_optimizer_states.pop(id(optimizer), None)
        return grads
    return list(torch._foreach_mul(grads, 1.0 / scaler.get_scale()))


def overflowed(scaler: Any, grads: list[Tensor], sharding: Sharding | None = None) -> bool:
    """Whether any gradient is infinite or NaN, on any rank that has shards of them.

    Checked only with a scaler, where this is an ordinary event.
    """
    if scaler is None or not scaler.is_enabled():
        return False
    filled = [gradient for gradient in grads if gradient.numel()]
    found = bool(filled) and not _finite(filled)
    return found if sharding is None else sharding.any(found)


def _finite(tensors: list[Tensor]) -> bool:
    sizes = torch._foreach_norm(tensors, float("inf"))
    return bool(torch.stack([size.to(sizes[0].device, torch.float32) for size in sizes]).isfinite().all())


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
    states = getattr(scaler, "_per_optimizer_states", {})
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


def _introducing(step: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.step` that tells an `llqr.Optimizer` who calls.

    torch lets a scaler pass itself only to an optimizer whose `step` names a `grad_scaler`, and warns that it will stop
    to; it no longer does once a framework has replaced `step`, and then looks for overflows before the closure has
    computed anything. It also refuses to step before it has scaled a loss, which here happens in the closure. Nothing
    changes for other optimizers.
    """

    @functools.wraps(step)
    def introduced(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **settings: Any) -> Any:
        called_by = getattr(optimizer, "_called_by", None)
        if called_by is None or not scaler.is_enabled():
            return step(scaler, optimizer, *args, **settings)
        if scaler._scale is None:
            parameter = optimizer.param_groups[0]["params"][0]
            scaler._lazy_init_scale_growth_tracker(parameter.device)
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        with called_by(scaler):
            own = _skips(scaler, optimizer, *args, **settings)
            loss = (functools.partial(type(optimizer).step, optimizer) if own else optimizer.step)(*args, **settings)
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        return loss

    return introduced


def _skips(scaler: GradScaler, optimizer: Any, closure: Callable[[], Any] | None = None, **_: Any) -> bool:
    """Whether gradients that are there overflow, and a framework must not see a step: it has replaced `step` to count.

    torch does not call `step` then. Ours is called past the framework, because the weights may be at the probe.
    """
    counts = optimizer.__dict__.get("step")
    if counts is None or closure is not None or getattr(counts, "_wrapped_by_lr_sched", False):
        return False
    unscale_once(scaler, optimizer, optimizer.base)
    found = scaler._per_optimizer_states[id(optimizer.base)]["found_inf_per_device"].values()
    return any(bool(number.item()) for number in found)


GradScaler.step = _introducing(GradScaler.step)  # type: ignore[method-assign]
