"""How a network is measured on a user's test data: by its loss, by accuracy, or by a function of the user."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llqr.curvature.batch import ignore_index
from llqr.lab.errors import ConfigurationError
from llqr.lab.tasks.own.batches import Pair, rows
from llqr.lab.tasks.own.experiment import Evaluation, Metric


class Measuring(NamedTuple):
    """What the evaluations of an experiment compute: numbers by name, of which ``metric`` decides."""

    metric: str
    larger_is_better: bool
    measure: Callable[[nn.Module, Iterable[Pair]], dict[str, float]]


def measured(
    forward: Any,
    loss: Any,
    model: nn.Module,
    batches: Iterable[Pair],
    *,
    accuracy: bool = False,
    metric: Metric | None = None,
) -> dict[str, float]:
    """The mean loss; before it, how often the largest output is that of the target, in per cent, or a user's metric.

    That is a function of all outputs and targets of the test data, joined in host memory.
    """
    total = terms = correct = counted = 0.0
    kept: list[Pair] = []
    for inputs, targets in batches:
        outputs = forward(model, inputs)
        weight = _terms(loss, inputs, targets)
        total += weight * float(loss(outputs, targets)) if weight else 0.0
        terms += weight
        if accuracy:
            axis, real = class_axis(outputs, targets), targets != ignore_index(loss)
            assert axis is not None
            correct += int(((outputs.argmax(axis) == targets) & real).sum())
            counted += int(real.sum())
        if metric is not None:
            kept.append((outputs.cpu(), targets))
    if not terms:
        raise ConfigurationError("test gave no batch.")
    found = {"accuracy": 100 * correct / counted} if accuracy else {}
    if metric is not None:
        name = name_of(metric)
        found[name] = number(name, metric(_joined([one for one, _ in kept]), _joined([one for _, one in kept])))
    return found | {"loss": total / terms}


def _terms(loss: Any, inputs: Any, targets: Any) -> float:
    """What the loss of a batch is a mean over: targets that count, with the weights of their classes, or samples."""
    if isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex():
        real = targets[targets != ignore_index(loss)]
        weighs = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
        return float(loss.weight[real].sum()) if weighs else len(real)
    return rows((targets, inputs))


def evaluated(evaluate: Evaluation, model: nn.Module, batches: Iterable[Pair]) -> dict[str, float]:
    """What a user's ``evaluate`` finds."""
    found = evaluate(model, batches)
    if not isinstance(found, dict) or not found:
        got = type(found).__name__ if found else repr(found)
        raise ConfigurationError(f"evaluate must return a dict of numbers by name, got {got}.")
    return {str(name): number(str(name), value) for name, value in found.items()}


def class_axis(outputs: Any, targets: Any) -> int | None:
    """The axis of the class scores if the targets are classes; None if they are not."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if outputs.ndim != targets.ndim + 1 or not outputs.is_floating_point() or targets.dtype == torch.bool:
        return None
    if outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        return 1
    return -1 if outputs.shape[:-1] == targets.shape else None


def name_of(metric: Metric) -> str:
    name = getattr(metric, "__name__", type(metric).__name__)
    return name if name.isidentifier() else "metric"


def number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{name} must be one number, got {type(value).__name__}.") from error


def _joined(parts: list[Any]) -> Any:
    if not all(isinstance(part, Tensor) for part in parts):
        raise ConfigurationError("metric needs outputs and targets that are tensors; give evaluate(model, batches).")
    try:
        return torch.cat([part.cpu() for part in parts])
    except RuntimeError as error:
        raise ConfigurationError(
            "metric needs batches that can be joined, and theirs differ in shape; give evaluate(model, batches)."
        ) from error
