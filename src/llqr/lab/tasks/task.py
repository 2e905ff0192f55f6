"""What the training loop needs to know of a problem. It knows nothing else: no images, no labels, no tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from llqr.curvature.batch import call_model
from llqr.lab.data import Batches

if TYPE_CHECKING:
    from llqr.lab.config.run import Run


Batch = tuple[Any, Any]
"""Inputs and targets; each a tensor or nested containers of tensors."""


@dataclass(frozen=True)
class TaskOptions:
    """Options of a task whose loss is a cross-entropy."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}.")


class Task(ABC):
    """A data set on a device, a loss, and metrics of what was learned.

    The class methods tell what a recipe must know before any data is read.
    """

    options: ClassVar[type] = TaskOptions
    """The dataclass that reads ``task.options`` of a recipe."""
    device: torch.device
    metric: str
    """The metric that decides which evaluation was the best."""
    larger_is_better: bool
    unit: ClassVar[str]
    """What throughput counts."""
    split: Literal["test", "valid"] = "test"
    """What evaluations use. With ``valid`` the best weights are kept, and measured on the test set in the end."""
    samples_measured: ClassVar[int] = 512
    """How many training samples the sharpness of a solution is measured on by default."""
    captured: ClassVar[bool] = True
    """Whether passes are captured as CUDA graphs unless the command says otherwise."""
    varies_with_seed: ClassVar[bool] = False
    """Whether model and data are made anew for every seed."""

    # -- before any data is read ---------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def data_options(cls, name: str) -> type:
        """The dataclass that reads ``data.options`` for the data set ``name``; a `ValueError` if there is none."""

    @classmethod
    @abstractmethod
    def build_model(cls, run: Run) -> nn.Module:
        """The network of a run, with the sizes that its data set needs."""

    @classmethod
    def steps_per_epoch(cls, run: Run) -> int | None:
        """How many steps an epoch has, where that is known without reading the data."""
        return None

    @classmethod
    def split_of(cls, run: Run) -> Literal["test", "valid"]:
        """The `split` of a run."""
        return cls.split

    @classmethod
    def remark(cls, run: Run) -> str:
        """What the sizes of a network depend on that is not known yet."""
        return ""

    @classmethod
    def prepared_key(cls, run: Run) -> str | None:
        """The `data_key` of the data as they are now, where it is known without reading them."""
        return None

    # -- with the data -------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def load(cls, run: Run, device: torch.device, seed: int) -> Self:
        """The task of the runs with this seed, with its data read; a `DataError` if they are missing or damaged."""

    def new_model(self, run: Run) -> nn.Module:
        """The network of a run that begins; its random weights come from the global generator."""
        return run.build_model()

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device of this task, in the memory format of its inputs."""
        return model.to(self.device)

    @abstractmethod
    def train_batches(self, batch_size: int, seed: int) -> Batches:
        """An endless source of shuffled training batches; ``seed`` decides everything random in it."""

    def inner_batches(self, batch_size: int, seed: int) -> Batches:
        """The batches that the metric is learned from, all of one shape so that a refresh can be captured."""
        return self.train_batches(batch_size, seed)

    def samples(self, count: int, seed: int) -> tuple[Batch, int]:
        """One batch of ``count`` training samples, or of all if there are fewer, and its number of samples."""
        count = min(count, self.inner_batches(1, seed).count)
        return next(iter(self.inner_batches(count, seed))), count

    def samples_in(self, batch_size: int, like: Batch) -> int:
        """How many samples of the shape of ``like`` make a training batch of this size."""
        return batch_size

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """What the loss is computed from."""
        return call_model(model, inputs)

    def differentiable_forward(self, model: nn.Module, inputs: Any) -> Any:
        """The same as `forward` by operations that have all derivatives, which fast kernels may lack."""
        return self.forward(model, inputs)

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean training loss. Where some targets do not count, a callable whose ``ignore_index`` they are."""

    @abstractmethod
    def size(self, batch: Batch) -> int:
        """How many units of throughput a batch has; known without asking the device."""

    @abstractmethod
    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """The metrics of a model in eval mode, on `split` or, once per run, on "test"."""

    @property
    def data_key(self) -> str | None:
        """Changes with the data, where a command prepared them: runs with other data are other runs."""
        return None

    def facts(self) -> dict[str, Any]:
        """What the numbers of a run depend on beyond its configuration, such as how a metric was computed."""
        return {}


class TaskCache:
    """Reads the data of a run when they are needed and keeps them for the runs after it that use the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest: tuple[tuple[object, ...], Task] | None = None

    def load(self, run: Run, seed: int) -> Task:
        key = (run.task, run.data, run.training, seed if run.task_type.varies_with_seed else None)
        if self._latest is None or self._latest[0] != key:
            self._latest = None  # its memory is free before the next data are read
            self._latest = key, run.load_task(self._device, seed)
        return self._latest[1]
