"""A user's experiment as a task: the training loop, run folders and reports of the laboratory then apply to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.curvature.batch import call_model, ignore_index
from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError
from llqr.lab.own.data import LoaderBatches, Pair, Place, SampleBatches, Samples, read, rows, seeded, understood
from llqr.lab.own.experiment import Experiment, of_seed
from llqr.lab.tasks.task import Batch, Task

if TYPE_CHECKING:
    from llqr.lab.config.run import Run

EVALUATION_SEED = 0


@dataclass(frozen=True)
class NoOptions:
    """An experiment of one's own is complete: its task and its data have no options."""


class OwnTask(Task):
    """The experiment that ``data.root`` of the run names: a function of a file, or an object of the program."""

    options = NoOptions
    unit = "samples"
    captured = False  # a network may look at its numbers, which a graph cannot
    varies_with_seed = True

    def __init__(self, experiment: Experiment, run: Run, device: torch.device) -> None:
        self.device, self.experiment, self._run = device, experiment, run
        self._place = Place(device, run.training.channels_last)
        loss = experiment.loss
        self._loss = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
        self.split = "test" if experiment.valid is None else "valid"
        self._data = {
            name: understood(name, getattr(experiment, name), experiment.workers)
            for name in ("train", "test", self.split)
        }
        outputs, targets = self._try_out()
        own = experiment.metric or experiment.evaluate
        self._accuracy = own is None and class_axis(outputs, targets) is not None
        self.larger_is_better = self._accuracy if own is None else bool(experiment.larger_is_better)
        self.metric = "accuracy" if self._accuracy else "loss"
        if experiment.metric is not None:
            name = getattr(experiment.metric, "__name__", "")
            self.metric = name if name.isidentifier() else "metric"
        elif experiment.evaluate is not None:
            with seeded(0), torch.no_grad():
                self.metric = next(iter(self.evaluate(self.place(experiment.new_model()).eval())))

    # -- before any data is read ---------------------------------------------------------------------------------------

    @classmethod
    def data_options(cls, name: str) -> type:
        return NoOptions

    @classmethod
    def build_model(cls, run: Run) -> nn.Module:
        wanted = torch.get_default_device()
        with torch.device("cpu"), seeded(0):
            model = of_seed(run.data.root, 0).new_model()
        return model.to("meta") if wanted.type == "meta" else model

    @classmethod
    def steps_per_epoch(cls, run: Run) -> int:
        data = understood("train", of_seed(run.data.root, 0).train)
        return len(_batches(data, run, run.training.batch_size, 0, Place(torch.device("cpu"))))

    # -- with the data -------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, run: Run, device: torch.device, seed: int) -> Self:
        return cls(of_seed(run.data.root, seed), run, device)

    def new_model(self, run: Run) -> nn.Module:
        return self.experiment.new_model()

    def place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self._place.channels_last else model  # type: ignore[call-overload,no-any-return]

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return _batches(self._data["train"], self._run, batch_size, seed, self._place)

    def samples(self, count: int, seed: int) -> tuple[Batch, int]:
        if isinstance(self._data["train"], Samples):
            return super().samples(count, seed)
        batch: Batch | None = None
        for more in self.train_batches(self._run.training.batch_size, seed):
            batch = more if batch is None else pytree.tree_map(_joined, batch, more)
            if rows(batch) >= count:
                break
        assert batch is not None
        return batch, rows(batch)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return (self.experiment.forward or call_model)(model, inputs)

    @property
    def loss(self) -> Any:  # the user's own, so that a geometry finds its ignore_index
        return self._loss

    def size(self, batch: Batch) -> int:
        return rows(batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._measure(model, self.split)

    def test(self, model: nn.Module) -> dict[str, float]:
        return self._measure(model, "test")

    def _measure(self, model: nn.Module, name: str) -> dict[str, float]:
        """Compute the mean loss; before it accuracy in per cent or the user's metric, or only their ``evaluate``."""
        experiment, batches = self.experiment, self._batches_of(name)
        if experiment.evaluate is not None:
            return {key: float(value) for key, value in experiment.evaluate(model, batches).items()}
        total = terms = correct = counted = 0.0
        kept: list[Pair] = []
        for inputs, targets in batches:
            outputs = self.forward(model, inputs)
            weight = _terms(self.loss, inputs, targets)
            total += weight * float(self.loss(outputs, targets)) if weight else 0.0
            terms += weight
            if self._accuracy:
                axis, real = class_axis(outputs, targets), targets != ignore_index(self.loss)
                assert axis is not None
                correct += int(((outputs.argmax(axis) == targets) & real).sum())
                counted += int(real.sum())
            if experiment.metric is not None:
                kept.append((outputs.cpu(), targets.cpu()))
        found = {"accuracy": 100 * correct / counted} if self._accuracy else {}
        if experiment.metric is not None:
            found[self.metric] = float(experiment.metric(*(torch.cat(parts) for parts in zip(*kept, strict=True))))
        return found | {"loss": total / terms}

    def _batches_of(self, name: str) -> Iterator[Pair]:
        """Iterate over all samples once, in the order of the data."""
        loader = self._data[name]
        if isinstance(loader, Samples):
            parts = torch.arange(len(loader)).split(self._run.training.eval_batch_size)
            loader = loader.loader([(EVALUATION_SEED, part.tolist()) for part in parts], self.device)
        return map(self._place.pair, read(loader, EVALUATION_SEED))

    def _try_out(self) -> Pair:
        """Run model and loss on a batch before anything is trained; return its outputs and targets."""
        with seeded(0), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # that is broadcast to the outputs'
            model = self.place(self.experiment.new_model()).eval()
            for name in (self.split, "train"):
                inputs, targets = next(self._batches_of(name))
                outputs = _tried("model", name, self.forward, model, inputs)
                if not isinstance(outputs, Tensor):
                    raise ConfigurationError(
                        f"model must return a tensor, got {type(outputs).__name__}; give forward(model, inputs)."
                    )
                loss = _tried("loss", name, self.loss, outputs, targets)
                if not isinstance(loss, Tensor) or loss.ndim:
                    raise ConfigurationError("loss must return one number, the mean over the batch.")
        return outputs, targets


def class_axis(outputs: Any, targets: Any) -> int | None:
    """Return the axis of the class scores if the targets are classes, otherwise None."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        return None
    if not outputs.is_floating_point() or outputs.ndim != targets.ndim + 1:
        return None
    fitting = (axis for axis in (1, -1) if outputs.shape[axis] > 1)  # the largest of one output says nothing
    return next((axis for axis in fitting if outputs.select(axis, 0).shape == targets.shape), None)


def _batches(data: Any, run: Run, batch_size: int, seed: int, place: Place) -> Batches:
    if isinstance(data, Samples):
        return SampleBatches(data, batch_size, seed=seed, last=run.training.last, place=place)
    return LoaderBatches(data, seed=seed, place=place)


def _terms(loss: Any, inputs: Any, targets: Any) -> float:
    """Count what the loss of a batch is a mean over: targets, by the weights of their classes, or samples."""
    if isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex():
        real = targets[targets != ignore_index(loss)]
        weights = getattr(loss, "weight", None)
        return float(weights[real].sum()) if isinstance(weights, Tensor) else len(real)
    return rows((targets, inputs))


def _joined(one: Any, other: Any) -> Any:
    return torch.cat([one, other]) if isinstance(one, Tensor) else one


def _tried(what: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's model or loss on a batch of the data called ``name``."""
    try:
        return function(*arguments)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigurationError(f"{what} fails on a batch of {name} ({type(error).__name__}: {reason}).") from error
