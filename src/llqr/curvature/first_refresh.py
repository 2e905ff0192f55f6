"""What is looked at once, in the first refresh: whether a metric can be learned from this model, loss and batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from llqr.caller_warnings import warn
from llqr.curvature import Loss, Named, Problem, QuadraticModel
from llqr.curvature.batch import samples_in, taken_rows
from llqr.curvature.derivatives import UnconnectedError
from llqr.curvature.losses import doubles_with_the_batch, ignored_but_counted
from llqr.refresh.report import RefreshWarning

#: Outputs that differ by less (relative) are the same: low precision rounds them, and kernels depend on the batch size.
SAME = 0.05


def try_out(problem: Problem) -> None:
    """Find out what model and loss write to, and refuse a batch that the model cannot be called on."""
    try:
        problem.find_writes()
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        raise
    except RuntimeError:
        _check_runs(problem)  # there are operations that torch does not let anyone look at, as in flex_attention
    if _mixes_samples(problem):
        raise ValueError(
            "micro_batch: the outputs of a sample depend on the samples before it (is the batch another dimension than "
            "the first?), so that pieces would give other outputs; leave micro_batch out"
        )
    with suppress(Exception):  # of a loss that cannot be computed, which is called again
        problem.find_loss_modules()


def _check_runs(problem: Problem) -> None:
    """Say so if the model itself does not run, and not one of its derivatives."""
    with torch.no_grad():
        try:
            problem.outputs(problem.parameters, problem.pieces[0])
        except NotImplementedError:
            return
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"batch: the model cannot be called on its inputs ({reason})") from error


@torch.no_grad()
def _mixes_samples(problem: Problem) -> bool:
    """Whether the outputs of a sample depend on those before it in the batch, so that pieces are not the whole.

    A sample is computed behind the first samples of the batch, and behind its last ones.
    """
    rows, size = samples_in(problem.inputs) or 0, max(2, samples_in(problem.pieces[0]) or 0)
    if len(problem.pieces) == 1 or rows < size:
        return False
    orders = (range(size), (*range(rows - size + 1, rows), size - 1))
    some = (taken_rows(problem.inputs, torch.tensor(list(order))) for order in orders)
    ahead, behind = (problem.outputs(problem.parameters, samples) for samples in some)
    if ahead.shape != behind.shape or not ahead.ndim or ahead.shape[0] % size:
        return False  # it cannot be told
    own = ahead.shape[0] // size
    difference, whole = (ahead[-own:] - behind[-own:]).double().norm(), ahead[-own:].double().norm()
    return bool(difference > SAME * whole)


def check_loss(problem: Problem) -> None:
    """Say so if the loss itself cannot be computed, and not one of its derivatives."""
    try:
        with torch.no_grad():
            outputs = [problem.outputs(problem.parameters, piece) for piece in problem.pieces]
        with torch.enable_grad():
            whole = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).requires_grad_()
            loss = problem.loss(whole)
            slope = torch.autograd.grad(loss, whole, create_graph=True)[0] if loss.requires_grad else None
    except (torch.OutOfMemoryError, NotImplementedError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"loss_fn: it cannot be computed from the outputs and the targets ({reason})") from error
    if slope is None:
        raise RuntimeError("loss_fn: it does not depend on the outputs; does it detach them?")
    try:
        torch.autograd.grad(slope, whole, slope.detach(), materialize_grads=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(
            f"loss_fn: torch cannot differentiate it twice ({reason}), which the curvature is made of; write it in "
            "elementary operations"
        ) from error


def check_model(
    problem: Problem, model: QuadraticModel, is_zero: Callable[[Named], bool], *, curvature_is_sum: bool
) -> None:
    """Refuse a model, or warn of a loss, from which the wrong metric or none is learned.

    `problem` has kept the outputs of the pass that `model` is made of, where the engine shows them.
    """
    if any(part.is_cuda for part in model.gradient.values()) and torch.cuda.is_current_stream_capturing():
        return
    if bypassed := problem.bypassed():
        raise UnconnectedError(bypassed)
    with torch.no_grad():
        if unseen := [name for name in sorted(problem.read_by_loss) if is_zero({name: model.gradient[name]})]:
            warn(
                f"loss_fn: it reads {', '.join(unseen)} from the model, which a refresh takes for constants, and so "
                "learns no U for them; let forward= return what they compute",
                RefreshWarning,
            )
        if problem.seen is not None:
            with problem.loss_on_copies():
                _warn_of_loss(problem.loss_fn, problem.seen, problem.targets, curvature_is_sum=curvature_is_sum)
        problem.keeps_outputs, problem.seen = False, None
        if not is_zero(model.gradient) and is_zero(model.product(model.gradient)):
            warn(
                "loss_fn: the curvature along the gradient is zero, as that of a loss that is linear in the "
                "outputs is (does forward= return the loss itself?), so that U only grows; instead of nll_loss of "
                "log-probabilities pass cross_entropy, which is the same number and has a curvature",
                RefreshWarning,
            )


def _warn_of_loss(loss_fn: Loss, outputs: Tensor, targets: Any, *, curvature_is_sum: bool) -> None:
    if doubles_with_the_batch(loss_fn, outputs, targets):
        warn(
            "loss_fn: it doubles when every sample is taken twice, so that it seems to be a sum over the batch, where "
            "the mean is expected",
            RefreshWarning,
        )
    if curvature_is_sum and (silent := ignored_but_counted(loss_fn, outputs, targets)):
        warn(
            f"loss_fn: it ignores the targets {', '.join(map(str, silent))}, but does not say so, and they count as "
            "terms of its mean, by which the curvature is scaled; pass "
            f"functools.partial(F.cross_entropy, ignore_index={silent[0]}), or a loss with that attribute",
            RefreshWarning,
        )
