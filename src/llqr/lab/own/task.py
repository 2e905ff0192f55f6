"""A user's experiment as a task: the training loop, run folders and reports of the laboratory then apply to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from llqr.curvature.batch import call_model, counted_terms, ignore_index, opened, samples_in, setting, split_batch
from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError
from llqr.lab.own.experiment import Experiment, of_seed, seeded
from llqr.lab.tasks.task import Batch, Task

if TYPE_CHECKING:
    from llqr.lab.config.run import Run

EVALUATION_SEED = 0


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """A data set from which batches of any size are drawn.

    A request for a batch is a seed, which decides the augmentation in whatever process it is made, and indices.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0

    @classmethod
    def of(cls, name: str, data: Any, workers: int = 0) -> Self:
        """Return the samples of a pair of tensors or arrays, a data set, or a plain `DataLoader`, which is taken apart.

        ``name`` is the argument of the experiment that gave the data.
        """
        pair = isinstance(data, tuple | list) and len(data) == 2
        indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if pair and all(isinstance(one, Tensor | np.ndarray) for one in data):
            if len(data[0]) != len(data[1]):
                raise ConfigurationError(f"{name} has {len(data[0])} inputs and {len(data[1])} targets.")
            found = cls(TensorDataset(*map(torch.as_tensor, data)), workers=workers)
        elif isinstance(data, DataLoader) and _is_plain(data):
            found = cls(data.dataset, data.collate_fn, data.num_workers)
        elif indexed and not isinstance(data, list | tuple | dict | str | IterableDataset):
            found = cls(data, workers=workers)
        else:
            raise ConfigurationError(
                f"{name}: pass the data set, a pair of tensors, or a DataLoader that only shuffles, "
                f"got {type(data).__name__}."
            )
        if not len(found):
            raise ConfigurationError(f"{name} is empty.")
        return found

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: tuple[int, list[int]]) -> Any:
        seed, indices = request
        with seeded(seed):
            if type(self.dataset) is TensorDataset and self.collate is default_collate:
                return list(self.dataset[indices])  # tensors are indexed at once
            return self.collate([self.dataset[index] for index in indices])


def _is_plain(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return False
    sampler = loader.sampler
    whole = len(sampler) == len(loader.dataset)  # type: ignore[arg-type]  # it has a length, unless it is a stream
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and whole
    return shuffles or type(sampler) is SequentialSampler


def _unchanged(batch: Any) -> Any:
    return batch


class SampleBatches(Batches):
    """Batches of samples; ``pair`` makes inputs and targets of what the data set gives."""

    def __init__(self, samples: Samples, batch_size: int, pair: Callable[[Any], Batch], **order: Any) -> None:
        super().__init__(len(samples), batch_size, **order)
        self._samples, self._pair = samples, pair
        self._seeds = [EVALUATION_SEED] * self.steps

    def _draw(self, total: int) -> None:
        self._seeds = torch.randint(2**62, (self.steps,), generator=self.generator).tolist()

    def _produce(self, order: Tensor, first: int) -> Iterator[Batch]:
        parts = [part.tolist() for part in order.split(self.batch_size)]
        loader: DataLoader[Any] = DataLoader(
            self._samples,
            batch_sampler=list(zip(self._seeds, parts, strict=True))[first:],  # type: ignore[arg-type]
            collate_fn=_unchanged,
            num_workers=self._samples.workers,
            generator=torch.Generator(),  # otherwise it would draw from the global generator
        )
        return map(self._pair, loader)


# -- task --------------------------------------------------------------------------------------------------------------


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
        loss = experiment.loss
        self._loss = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
        self.split = "test" if experiment.valid is None else "valid"
        names = {"train", "test", self.split}
        self._data = {name: Samples.of(name, getattr(experiment, name), experiment.workers) for name in names}
        self.metric, self.larger_is_better = self._chosen_metric()

    def _chosen_metric(self) -> tuple[str, bool]:
        """The user's metric, accuracy if the targets are classes, otherwise the loss; tried out before any training."""
        with seeded(0), torch.no_grad():
            model = self.place(self.experiment.new_model()).eval()
            inputs, targets = next(self._batches_of(self.split))
            outputs = self.forward(model, inputs)
            if not isinstance(outputs, Tensor):
                raise ConfigurationError(
                    f"model must return a tensor, got {type(outputs).__name__}; give forward(model, inputs)."
                )
            loss = self.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ConfigurationError("loss must return one number, the mean over the batch.")
        if self.experiment.metric is not None:
            name = getattr(self.experiment.metric, "__name__", "metric")
            return "metric" if name == "loss" else name, bool(self.experiment.larger_is_better)
        return ("loss", False) if class_axis(outputs, targets) is None else ("accuracy", True)

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
    def split_of(cls, run: Run) -> Literal["test", "valid"]:
        return "test" if of_seed(run.data.root, 0).valid is None else "valid"

    @classmethod
    def steps_per_epoch(cls, run: Run) -> int:
        count, batch_size = len(Samples.of("train", of_seed(run.data.root, 0).train)), run.training.batch_size
        return count // batch_size if run.training.last == "drop" else -(-count // batch_size)

    # -- with the data -------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, run: Run, device: torch.device, seed: int) -> Self:
        return cls(of_seed(run.data.root, seed), run, device)

    def new_model(self, run: Run) -> nn.Module:
        return self.experiment.new_model()

    def place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self._run.training.channels_last else model  # type: ignore[call-overload,no-any-return]

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return SampleBatches(self._data["train"], batch_size, self._pair, seed=seed, last=self._run.training.last)

    def _pair(self, batch: Any) -> Batch:
        """Split a batch into inputs and targets on the device."""
        return split_batch(pytree.tree_map_only(Tensor, self._moved, opened(batch)))

    def _moved(self, tensor: Tensor) -> Tensor:
        last = self._run.training.channels_last and tensor.ndim == 4
        memory_format = torch.channels_last if last else torch.preserve_format
        return tensor.to(self.device, non_blocking=True, memory_format=memory_format)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return (self.experiment.forward or call_model)(model, inputs)

    @property
    def loss(self) -> Any:  # the user's own, so that a geometry finds its ignore_index
        return self._loss

    def size(self, batch: Batch) -> int:
        return samples_in(batch) or 0

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Compute the mean loss; before it accuracy in per cent or the user's metric."""
        total = terms = correct = counted = 0.0
        kept: list[Batch] = []
        for inputs, targets in self._batches_of(split):
            outputs = self.forward(model, inputs)
            weight = self._terms(outputs, targets)
            total += weight * float(self.loss(outputs, targets)) if weight else 0.0
            terms += weight
            if self.experiment.metric is not None:
                kept.append((outputs.cpu(), targets.cpu()))
            elif self.metric == "accuracy":
                axis, real = class_axis(outputs, targets), targets != ignore_index(self.loss)
                assert axis is not None
                correct += int(((outputs.argmax(axis) == targets) & real).sum())
                counted += int(real.sum())
        found = {"loss": total / terms}
        if self.experiment.metric is not None:
            joined = (torch.cat(parts) for parts in zip(*kept, strict=True))
            return {self.metric: float(self.experiment.metric(*joined))} | found
        return {"accuracy": 100 * correct / counted} | found if self.metric == "accuracy" else found

    def _terms(self, outputs: Tensor, targets: Any) -> float:
        """Count what the loss of a batch is a mean over: targets, by the weights of their classes, or samples."""
        of_classes = getattr(self.loss, "func", None) in (F.cross_entropy, F.nll_loss)
        of_classes = of_classes or isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss)
        weights = setting(self.loss, "weight", None) if of_classes else None
        if isinstance(weights, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point():
            return float(weights[targets[targets != ignore_index(self.loss)]].sum())
        return float(counted_terms(self.loss, targets, outputs))

    def _batches_of(self, name: str) -> Iterator[Batch]:
        """Iterate over all samples once, in the order of the data."""
        size = self._run.training.eval_batch_size
        return iter(SampleBatches(self._data[name], size, self._pair, seed=None, last="keep"))


def class_axis(outputs: Any, targets: Any) -> int | None:
    """Return the axis of the class scores if the targets are classes, otherwise None."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        return None
    if not outputs.is_floating_point() or outputs.ndim != targets.ndim + 1:
        return None
    # The largest of one output says nothing.
    fitting = [x for x in (1, -1) if outputs.shape[x] > 1 and outputs.select(x, 0).shape == targets.shape]
    if len(fitting) > 1 and outputs.ndim > 2:
        raise ConfigurationError(
            "metric must be given: axis 1 of the outputs and the last one may both be that of the classes."
        )
    return fitting[0] if fitting else None
