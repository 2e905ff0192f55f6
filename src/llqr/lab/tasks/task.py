"""What the training loop needs to know of a problem. It knows nothing else: no images, no labels, no tokens."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn

from llqr.lab.data import Batches
from llqr.lab.recipe import Recipe

Batch = tuple[Any, Any]
"""Inputs and targets; each a tensor or nested containers of tensors."""


class Task(ABC):
    """A data set on a device, a loss, and test metrics."""

    metric: str
    """The test metric that decides which epoch was the best."""
    larger_is_better: bool
    unit: str
    """What throughput counts."""

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

    @abstractmethod
    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """What the loss is computed from."""

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean training loss."""

    @abstractmethod
    def size(self, batch: Batch) -> int:
        """How many units of throughput a batch is; known without asking the device."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The test metrics of a model in eval mode."""

    def better(self, new: float, old: float) -> bool:
        return new > old if self.larger_is_better else new < old
