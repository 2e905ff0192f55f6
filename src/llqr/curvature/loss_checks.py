"""What a loss does not say of itself, but shows: whether it is a sum, and which targets it ignores."""

import torch
from torch import Tensor, nn

from llqr.curvature.problem import Loss, Problem, ignore_index
from llqr.curvature.uncompiled import uncompiled

#: The smallest batch for which it is asked whether the loss is a sum.
FEWEST = 4


@uncompiled()
def doubles_with_the_batch(problem: Problem) -> bool:
    """Whether the loss of every sample taken twice is twice the loss, as that of a sum is, and not that of a mean.

    Computed from the outputs that the problem has kept; False if it cannot be told.
    """
    loss_fn, targets, outputs = problem.loss_fn, problem.targets, problem.seen
    if outputs is None or not isinstance(targets, Tensor) or not targets.ndim or not outputs.ndim:
        return False
    if not FEWEST <= len(outputs) == len(targets):
        return False
    if _keeps_statistics(loss_fn):
        return False
    once = loss_fn(outputs, targets)
    try:
        twice = loss_fn(torch.cat([outputs, outputs]), torch.cat([targets, targets])) - 2 * once
    except Exception:  # one that knows the size of its batch, as one with a weight for every sample does
        return False
    return bool(once != 0) and bool((twice.abs() <= 1e-3 * once.abs()).all())


@uncompiled()
def ignored_but_counted(problem: Problem) -> list[int]:
    """Targets that the loss ignores while they count as terms of its mean, because it does not say that it does.

    Where all outputs are zero, a cross-entropy has a slope for every sample but the ignored ones. Asked of outputs that
    the problem has kept; empty if it cannot be told.
    """
    loss_fn, targets, outputs = problem.loss_fn, problem.targets, problem.seen
    if outputs is None or not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        return []
    if hasattr(loss_fn, "terms") or _keeps_statistics(loss_fn):
        return []
    shape = outputs.shape
    class_dimensions = [i for i in range(len(shape)) if shape[:i] + shape[i + 1 :] == targets.shape]
    if len(class_dimensions) != 1:
        return []
    try:
        with torch.enable_grad():
            z = torch.zeros_like(outputs).requires_grad_()
            (slope,) = torch.autograd.grad(loss_fn(z, targets), z)
    except Exception:  # one that does not take any outputs, as one of probabilities does not
        return []
    without = (slope == 0).all(class_dimensions[0])
    if bool(without.all()):
        return []
    silent = set(targets[without].tolist()) - set(targets[~without].tolist())
    return sorted(silent - {ignore_index(loss_fn)})


def _keeps_statistics(loss_fn: Loss) -> bool:
    """Such a loss must not see a batch that is not one."""
    return isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers())
