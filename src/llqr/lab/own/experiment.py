"""What a user gives: a model, a loss, data, and settings that differ from the defaults; and where it comes from."""

import copy
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llqr.curvature import Forward, Loss
from llqr.curvature.batch import is_sum
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.own import is_file

Metric = Callable[[Tensor, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to train, on which data, and how to measure it.

    Only the first four are needed. Settings that are left out have the defaults of the laboratory; `settings` sets
    any other one by its dotted name, as `--set` does.

    Attributes:
        model: the network, from whose weights every run starts, or a function that makes one, called for every seed.
        loss: `loss(outputs, targets)` -> the mean loss of a batch.
        train: a `Dataset`, a pair of tensors, or a `DataLoader` that only shuffles, from which data set, `collate_fn`
            and batch size are taken. A batch is `(inputs, targets)` or a mapping with "targets", "labels", "target",
            "label" or "y".
        test: the same, for the evaluations.
        valid: if given, evaluations use it, and `test` is measured once, with the best weights.
        metric: `metric(outputs, targets)` -> a number, of all outputs and targets of the test data joined. Default:
            accuracy in per cent where the targets are classes, otherwise the loss.
        larger_is_better: must be given with `metric`.
        forward: `forward(model, inputs)` -> outputs, for models that are not called as `model(inputs)`.
        name: what tables and folders call it; the default is the name of the file.
        epochs, batch_size, lr, weight_decay: of the base optimizer's training.
        base: the optimizer that the methods wrap: "sgdm", "adam" or "adamw".
        rho: the radius of SAM and F-SAM (default 0.05, usual with SGD; with Adam and AdamW try 0.005).
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
    larger_is_better: bool | None = None
    forward: Forward | None = None
    name: str | None = None
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
        for name in ("model", "loss", "metric", "forward"):
            given = getattr(self, name)
            if not callable(given) and (given is not None or name in ("model", "loss")):
                raise ConfigurationError(f"{name} must be a function or an nn.Module, got {type(given).__name__}.")
        if is_sum(self.loss):
            raise ConfigurationError("loss must be the mean over the batch, got a sum (reduction='sum').")
        if isinstance(self.loss, nn.Module) and any(p.requires_grad for p in self.loss.parameters()):
            raise ConfigurationError("loss has parameters, which would not be trained; make them part of the model.")
        if self.larger_is_better not in ((None,) if self.metric is None else (True, False)):
            raise ConfigurationError(
                "larger_is_better must be True or False with a metric of your own, and absent without one."
            )

    def new_model(self) -> nn.Module:
        """Make a network to train: a copy of the model, or what the function returns."""
        made = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(made, nn.Module):
            raise ConfigurationError(f"model() must return an nn.Module, got {type(made).__name__}.")
        return made


# -- where it comes from: a function of a Python file, or an object of the running program --------------------------

FUNCTION = "experiment"
"""The function that is called if none is named."""
held: dict[str, Experiment | Callable[..., Any]] = {}
"""By source, what this program has imported or was given."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the generators of torch, numpy and `random` start at ``seed``; then restore them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002  # user code draws from it
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def source_of(name: str) -> str:
    """Return ``file.py`` or ``file.py:function`` with an absolute path and the function."""
    file, _, function = name.rpartition(".py")
    return f"{Path(f'{file}.py').resolve()}:{function.removeprefix(':') or FUNCTION}"


def hold(experiment: Experiment, name: str) -> str:
    """Keep an object of this program for as long as it runs, and return its source."""
    source = f"{name}#{len(held)}"
    held[source] = experiment
    return source


def import_file(source: str) -> None:
    """Import the file of a source, anew if it was imported before."""
    of_seed.cache_clear()
    file, _, function = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
    name = f"llqr_experiment_{path.stem}"  # which hides no other module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # workers look for classes of samples here
    with seeded(0):  # a module may draw its data
        spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise ConfigurationError(f"{path.name} has no function {function}.")
    held[source] = getattr(module, function)


@lru_cache(maxsize=1)  # its data may be large
def of_seed(source: str, seed: int) -> Experiment:
    """Return what a source gives for a seed, with all random numbers seeded."""
    if source not in held:
        if not is_file(source):
            raise DataError(f"{source} was given to llqr.lab.compare as an object, which only that program has.")
        import_file(source)
    given = held[source]
    if isinstance(given, Experiment):
        return given
    with seeded(seed):
        made = given(seed=seed) if "seed" in inspect.signature(given).parameters else given()
    if not isinstance(made, Experiment):
        raise ConfigurationError(f"{source} must return an llqr.lab.Experiment, got {type(made).__name__}.")
    return made
