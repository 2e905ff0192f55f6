"""What the training loop needs to know of a problem. It knows nothing else: no images, no labels, no tokens."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from llqr.lab.config.recipe import Recipe
from llqr.lab.data import Batches

Batch = tuple[Any, Any]
"""Inputs and targets; each a tensor or nested containers of tensors."""


class Task(ABC):
    """A data set on a device, a loss, and metrics of what was learned."""

    metric: str
    """The metric that decides which evaluation was the best."""
    larger_is_better: bool
    unit: str
    """What throughput counts."""
    split: ClassVar[Literal["test", "valid"]] = "test"
    """What `evaluate` measures on. With ``valid`` the best weights are kept, and `test` measures those at the end."""
    samples_measured: ClassVar[int] = 512
    """How many training samples the sharpness of a solution is measured on, unless another number is asked for."""

    @classmethod
    @abstractmethod
    def load(cls, recipe: Recipe, device: torch.device) -> Self:
        """The task with its data read."""

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device of this task, in the memory format of its inputs."""

    @abstractmethod
    def train_batches(self, batch_size: int, seed: int) -> Batches:
        """An endless source of shuffled training batches; ``seed`` decides everything random in it."""

    def inner_batches(self, batch_size: int, seed: int) -> Batches:
        """The batches that the metric is learned from, all of one shape so that a refresh can be replayed."""
        return self.train_batches(batch_size, seed)

    def samples(self, count: int, seed: int) -> tuple[Batch, int]:
        """One batch of so many training samples, or of all there are; and how many they are."""
        count = min(count, self.inner_batches(count, seed).count)
        return next(iter(self.inner_batches(count, seed))), count

    def samples_in(self, batch_size: int, like: Batch) -> int:
        """How many samples of the shape of ``like`` make a training batch of this size."""
        return batch_size

    @abstractmethod
    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """What the loss is computed from."""

    def differentiable_forward(self, model: nn.Module, inputs: Any) -> Any:
        """The same as `forward` by operations that have all derivatives, which the fast ones may lack."""
        return self.forward(model, inputs)

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean training loss. Where some targets do not count, a callable whose ``ignore_index`` they are."""

    @abstractmethod
    def size(self, batch: Batch) -> int:
        """How many units of throughput a batch is; known without asking the device."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of a model in eval mode, on `split`."""

    def test(self, model: nn.Module) -> dict[str, float]:
        """The metrics on the test set, where `evaluate` does not measure there; asked for once in a run."""
        raise NotImplementedError(f"{type(self).__name__} evaluates on its test set.")

    @property
    def data_key(self) -> str | None:
        """Changes with the data, where these are made by a command: a run does not go on with other data."""
        return None

    def facts(self) -> dict[str, Any]:
        """What the numbers of a run depend on beyond its configuration, such as how a metric was computed."""
        return {}

    def better(self, new: float, old: float) -> bool:
        return new > old if self.larger_is_better else new < old
