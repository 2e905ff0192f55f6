"""A user's experiment as a task: the training loop, run folders and reports of the laboratory then apply to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from llqr.curvature.batch import call_model, ignore_index, tensors_of
from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError
from llqr.lab.tasks.own import sources
from llqr.lab.tasks.own.batches import (
    LoaderBatches,
    Pair,
    Place,
    SampleBatches,
    Samples,
    as_pair,
    fingerprint_of,
    own_generators,
    read_once,
    rows,
    understood,
)
from llqr.lab.tasks.own.experiment import Experiment
from llqr.lab.tasks.own.measuring import Measuring, class_axis, evaluated, measured, name_of
from llqr.lab.tasks.own.random_states import RandomStates
from llqr.lab.tasks.task import Batch, Task

if TYPE_CHECKING:
    from llqr.lab.config.run import Run

CLASS_LOSSES = (cross_entropy, nll_loss)
EVALUATION_SEED = 0
"""Evaluations draw random numbers, if any, from a stream of their own, always the same."""


@dataclass(frozen=True)
class OwnOptions:
    """``digest`` changes with the code and the data of the experiment: its runs are not mixed with those of others."""

    digest: str


@dataclass(frozen=True)
class NoOptions:
    """The data of an experiment have none: they come from its function."""


class OwnTask(Task):
    """The experiment of a file, a function of a module or a notebook, as `data.root` of the run says."""

    options = OwnOptions
    unit = "samples"
    captured = False  # a network may look at its numbers, which a graph cannot
    varies_with_seed = True
    of_images = True

    def __init__(self, experiment: Experiment, run: Run, device: torch.device) -> None:
        self.device = device
        self._place = Place(device, run.training.channels_last)
        self.experiment = experiment
        self._run = run
        self._loss = copy.deepcopy(experiment.loss).to(device) if isinstance(experiment.loss, nn.Module) else None
        self._train = understood("train", experiment.train, experiment.workers)
        held_out = "test" if experiment.valid is None else "valid"
        self.split = held_out  # type: ignore[assignment]  # one of the two
        self._evaluated = understood(held_out, getattr(experiment, held_out), experiment.workers)
        self._tested = understood("test", experiment.test, experiment.workers)
        self._measuring = self._try_out()
        self.metric, self.larger_is_better = self._measuring.metric, self._measuring.larger_is_better

    # -- before any data is read ---------------------------------------------------------------------------------------

    @classmethod
    def experiment_of(cls, run: Run, seed: int) -> Experiment:
        """What the user gives for this seed."""
        return sources.experiment(run.data.root, seed, run.task_options.digest)

    @classmethod
    def data_options(cls, name: str) -> type:
        return NoOptions

    @classmethod
    def build_model(cls, run: Run) -> nn.Module:
        """For its sizes: with the weights of seed 0, and none on the meta device."""
        wanted = torch.get_default_device()
        with torch.device("cpu"), RandomStates(0).inside():
            model = cls.experiment_of(run, 0).new_model()
        return model.to("meta") if wanted.type == "meta" else model

    @classmethod
    def steps_per_epoch(cls, run: Run) -> int:
        data = understood("train", cls.experiment_of(run, 0).train, 0)
        return len(_batches(data, run, run.training.batch_size, 0, Place(torch.device("cpu"))))

    # -- with the data -------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, run: Run, device: torch.device, seed: int) -> Self:
        return cls(cls.experiment_of(run, seed), run, device)

    def new_model(self, run: Run) -> nn.Module:
        return self.experiment.new_model()

    def place(self, model: nn.Module) -> nn.Module:
        try:
            model = model.to(self.device)
            if self._place.channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            return model
        except (NotImplementedError, RuntimeError) as error:  # weights on the meta device, or no memory
            raise ConfigurationError(f"model cannot be moved to {self.device} ({_first_line(error)}).") from error

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return _batches(self._train, self._run, batch_size, seed, self._place)

    def samples(self, count: int, seed: int) -> tuple[Batch, int]:
        if isinstance(self._train, Samples):
            return super().samples(count, seed)
        batch: Batch | None = None
        for more in self.train_batches(self._run.training.batch_size, seed):
            joined = more if batch is None else _joined(batch, more)
            if joined is None:
                break
            batch = joined
            if rows(batch) >= count:
                break
        assert batch is not None
        return batch, rows(batch)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return (self.experiment.forward or call_model)(model, inputs)

    @property
    def loss(self) -> Any:  # the user's own, so that a geometry finds its ignore_index
        return self._loss or self.experiment.loss

    def size(self, batch: Batch) -> int:
        return rows(batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._measuring.measure(model, self._batches_of(self._evaluated))

    def test(self, model: nn.Module) -> dict[str, float]:
        return self._measuring.measure(model, self._batches_of(self._tested))

    @cached_property
    def data_key(self) -> str:  # type: ignore[override]  # read once
        return fingerprint_of(self._train)

    def _batches_of(self, data: Samples | Iterable[Any]) -> Iterator[Pair]:
        """All samples once, in the order of the data."""
        loader = data
        if isinstance(data, Samples):
            size = self._run.training.eval_batch_size
            parts = torch.arange(data.count).split(size)
            loader = data.loader([(EVALUATION_SEED, part.tolist()) for part in parts], self.device)
        assert isinstance(loader, Iterable)
        for batch in read_once(loader, RandomStates(EVALUATION_SEED, own_generators(loader))):
            yield as_pair(batch, self._place)

    # -- what the user gave is tried out before anything is trained ----------------------------------------------------

    def _try_out(self) -> Measuring:
        """How the experiment is measured; one sentence names what does not work."""
        experiment, larger = self.experiment, bool(self.experiment.larger_is_better)
        with RandomStates(0).inside(), torch.no_grad():
            model = self.place(experiment.new_model()).eval()
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise ConfigurationError("model has no parameter that requires a gradient.")
            outputs, targets = self._try_passes(model, "train", self._train)
            self._try_passes(model, self.split, self._evaluated)
            if experiment.evaluate is not None:
                measure = partial(evaluated, experiment.evaluate)
                metric = next(iter(measure(model, self._batches_of(self._evaluated))))
                return Measuring(metric, larger, measure)
        measure = partial(measured, self.forward, self.loss)
        if experiment.metric is not None:
            return Measuring(name_of(experiment.metric), larger, partial(measure, metric=experiment.metric))
        axis = class_axis(outputs, targets)
        if axis is not None and outputs.shape[axis] > 1:  # the largest of one output says nothing
            return Measuring("accuracy", True, partial(measure, accuracy=True))
        return Measuring("loss", False, measure)

    def _try_passes(self, model: nn.Module, name: str, data: Samples | Iterable[Any]) -> Pair:
        """Outputs and targets of the first batch."""
        batch = next(self._batches_of(data), None)
        if batch is None:
            raise ConfigurationError(f"{name} gave no batch.")
        inputs, targets = batch
        if self._place.channels_last and all(tensor.ndim != 4 for tensor in tensors_of(inputs)):
            raise ConfigurationError(
                "training.channels_last is about images (batch, channels, height, width), and "
                f"the inputs of {name} hold none."
            )
        outputs = _tried("model cannot be called", name, self.forward, model, inputs)
        if not isinstance(outputs, Tensor):
            raise ConfigurationError(
                f"model must return a tensor, got {type(outputs).__name__}; give forward(model, inputs) that does."
            )
        axis = class_axis(outputs, targets)
        if axis is not None:
            self._check_classes(name, outputs.shape[axis], _all_targets(data, targets))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # that is broadcast to the outputs'
            loss = _tried("loss cannot be computed", name, self.loss, outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigurationError(f"loss must return one number, the mean over the batch, got {got}.")
        return outputs, targets

    def _check_classes(self, name: str, count: int, targets: Tensor) -> None:
        """Refuse classes without an output before a loss meets one of them, which on a GPU ends the process."""
        if self.loss not in CLASS_LOSSES and not isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss):
            return
        real = targets[targets != ignore_index(self.loss)]
        strange = real[(real < 0) | (real >= count)]
        if len(strange):
            raise ConfigurationError(
                f"{name} has the class {int(strange[0])}, but the model has {count} outputs, of the classes 0 to "
                f"{count - 1}."
            )


def _batches(data: Samples | Iterable[Any], run: Run, batch_size: int, seed: int, place: Place) -> Batches:
    if isinstance(data, Samples):
        return SampleBatches(data, batch_size, seed=seed, last=run.training.last, place=place)
    return LoaderBatches(data, seed=seed, place=place)


def _all_targets(data: Samples | Iterable[Any], first: Tensor) -> Tensor:
    """Those of a pair of tensors; of other data only the ``first`` ones, which were read already."""
    tensors = data.dataset.tensors if isinstance(data, Samples) and type(data.dataset) is TensorDataset else ()
    return tensors[1] if len(tensors) == 2 else first


def _joined(one: Batch, other: Batch) -> Batch | None:
    """Two batches as one; None if their tensors do not fit together."""

    def join(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return torch.cat([a, b])
        if a != b:
            raise ValueError("a batch has another constant")
        return a

    try:
        made: Batch = pytree.tree_map(join, one, other)
    except (RuntimeError, TypeError, ValueError):
        return None
    return made


def _tried(complaint: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a user's function returns for a batch of the data called ``name``."""
    try:
        return function(*arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigurationError(f"{complaint} on a batch of {name} ({reason}).") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
