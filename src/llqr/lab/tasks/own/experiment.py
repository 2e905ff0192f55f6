"""What a user gives: a model, a loss, data, and the settings that differ from the defaults."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from llqr.curvature import Forward, Loss
from llqr.curvature.batch import is_sum
from llqr.lab.errors import ConfigurationError

Metric = Callable[[Tensor, Any], Any]
Evaluation = Callable[[nn.Module, Iterable[Any]], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A comparison of one's own: what is trained, on what, and how it is measured.

    Only the first four are needed. Settings that are left out have the defaults of the laboratory; `settings` sets
    any other one by its dotted name, as `--set` does.

    Attributes:
        model: the network, from whose weights every run starts, or a function that makes one, called for every seed.
        loss: `loss(outputs, targets)` -> the mean loss of a batch.
        train: a `Dataset`, a `DataLoader`, or a list of batches. A batch is `(inputs, targets)` or a mapping with
            "targets", "labels", "target", "label" or "y".
        test: the same, for the evaluations.
        valid: if given, evaluations use it, and `test` is measured once, with the best weights.
        metric: `metric(outputs, targets)` -> a number, of all outputs and targets of the test data joined. Default:
            accuracy in per cent where the targets are classes, otherwise the loss.
        evaluate: instead of `metric`: `evaluate(model, batches)` -> numbers by name, of which the first decides.
        larger_is_better: must be given with `metric` or `evaluate`.
        forward: `forward(model, inputs)` -> outputs, for models that are not called as `model(inputs)`.
        name: what tables and folders call it; the default is the name of the file.
        title: the heading of its report.
        epochs, batch_size, lr, weight_decay: of the base optimizer's training.
        base: the optimizer that the methods wrap: "sgdm", "adam" or "adamw".
        rho: the radius of SAM and F-SAM.
        structure: of the metric that LLQR learns.
        every: steps between two refreshes of the metric.
        workers: processes that read a `Dataset`; those of a `DataLoader` are its own.
        settings: any other setting, such as `{"training.precision": "bf16"}`.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    train: Any
    test: Any
    valid: Any = None
    metric: Metric | None = None
    evaluate: Evaluation | None = None
    larger_is_better: bool | None = None
    forward: Forward | None = None
    name: str | None = None
    title: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    base: str = "sgdm"
    rho: float | None = None
    structure: str | Mapping[str, str] | None = None
    every: int | None = None
    workers: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("loss", "metric", "evaluate", "forward"):
            given = getattr(self, name)
            if not callable(given) and (given is not None or name == "loss"):
                raise ConfigurationError(f"{name} must be a function, got {type(given).__name__}.")
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise ConfigurationError(f"model must be an nn.Module or a function, got {type(self.model).__name__}.")
        if is_sum(self.loss):
            raise ConfigurationError("loss must be the mean over the batch, got a sum (reduction='sum').")
        if isinstance(self.loss, nn.Module) and any(p.requires_grad for p in self.loss.parameters()):
            raise ConfigurationError("loss has parameters, which would not be trained; make them part of the model.")
        if self.metric is not None and self.evaluate is not None:
            raise ConfigurationError("metric and evaluate must not both be given.")
        own = self.metric or self.evaluate
        if (own is None) != (self.larger_is_better is None):
            raise ConfigurationError(
                "larger_is_better must be True or False with a metric of your own, and absent without one."
            )

    def new_model(self) -> nn.Module:
        """A network to train: a copy of the model, or what the function makes with the current random state."""
        if not isinstance(self.model, nn.Module):
            made = self.model()
            if not isinstance(made, nn.Module):
                raise ConfigurationError(f"model() must return an nn.Module, got {type(made).__name__}.")
            _check_network(made)
            return made
        _check_network(self.model)
        try:
            return copy.deepcopy(self.model)
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(f"model cannot be copied ({reason}); give a function that makes it.") from error


def _check_network(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):  # its weights have other names than the library's
        raise ConfigurationError("model is what torch.compile returned; give the network itself, and --compile.")
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigurationError(f"model: {lazy} has no shape yet (a lazy module); call the model on a batch first.")
