"""What a loss says of itself, and what it only shows: whether it is a sum, and which targets it ignores."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llqr.curvature.uncompiled import uncompiled

Loss = Callable[[Tensor, Any], Tensor]

#: The smallest batch for which it is asked whether the loss is a sum.
FEWEST = 4


def is_sum(loss_fn: Loss) -> bool:
    """Whether a loss says that it is a sum: a module's attribute, or a partial's keyword."""
    if isinstance(loss_fn, functools.partial):
        return bool(loss_fn.keywords["reduction"] == "sum" if "reduction" in loss_fn.keywords else is_sum(loss_fn.func))
    return getattr(loss_fn, "reduction", None) == "sum"


def counted_terms(loss_fn: Loss, targets: Any) -> Tensor | None:
    """How many targets a mean loss is taken over, where it tells by them; None if every sample is a term."""
    counted: Callable[[Any], Tensor] | None = getattr(loss_fn, "terms", None)
    if counted is not None:
        return counted(targets)
    if isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex():
        return (targets != ignore_index(loss_fn)).sum()
    return None


def ignore_index(loss_fn: Loss) -> int:
    """The target a cross-entropy leaves out: a module's attribute, a partial's keyword, or torch's default -100."""
    if isinstance(loss_fn, functools.partial):
        return int(loss_fn.keywords.get("ignore_index", ignore_index(loss_fn.func)))
    return int(getattr(loss_fn, "ignore_index", -100))


@uncompiled()
def doubles_with_the_batch(loss_fn: Loss, outputs: Tensor, targets: Any) -> bool:
    """Whether the loss of every sample taken twice is twice the loss, as that of a sum is, and not that of a mean.

    False if it cannot be told.
    """
    if not isinstance(targets, Tensor) or not targets.ndim or not outputs.ndim:
        return False
    if not FEWEST <= len(outputs) == len(targets):
        return False
    try:
        once = loss_fn(outputs.clone(), targets)  # it may write to them
        twice = loss_fn(torch.cat([outputs, outputs]), torch.cat([targets, targets])) - 2 * once
    except Exception:  # one that knows the size of its batch, or differentiates by itself
        return False
    return bool(once != 0) and bool((twice.abs() <= 1e-3 * once.abs()).all())


@uncompiled()
def ignored_but_counted(loss_fn: Loss, outputs: Tensor, targets: Any) -> list[int]:
    """Targets that the loss ignores while they count as terms of its mean, because it does not say that it does.

    Where all outputs are equal, a cross-entropy has a slope for every sample but the ignored ones. Empty if it
    cannot be told.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        return []
    if hasattr(loss_fn, "terms"):
        return []
    shape = outputs.shape
    class_dimensions = [i for i in range(len(shape)) if shape[:i] + shape[i + 1 :] == targets.shape]
    if len(class_dimensions) != 1:
        return []
    without = torch.ones_like(targets, dtype=torch.bool)
    for level in (0.0, 0.5):  # a regression has no slope where the outputs are the targets
        try:
            with torch.enable_grad():
                z = torch.full_like(outputs, level).requires_grad_()
                (slope,) = torch.autograd.grad(loss_fn(z, targets), z)
        except Exception:  # one that does not take any outputs, as one of probabilities does not
            return []
        without &= (slope == 0).all(class_dimensions[0])
    if bool(without.all()):
        return []
    silent = set(targets[without].tolist()) - set(targets[~without].tolist())
    return sorted(silent - {ignore_index(loss_fn)})
