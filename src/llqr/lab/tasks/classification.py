"""Telling classes apart: cross-entropy, top-1 accuracy in per cent."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab import data
from llqr.lab.config.recipe import Recipe
from llqr.lab.data import Batches, ImageData
from llqr.lab.errors import DataError
from llqr.lab.tasks.task import Batch, Task


class ClassificationTask(Task):
    """Images in, class scores out. The test loss is the plain cross-entropy, whatever the label smoothing."""

    metric = "accuracy"
    larger_is_better = True
    unit = "images"

    def __init__(self, source: ImageData, recipe: Recipe, device: torch.device) -> None:
        self.device = device
        self._source = source
        self._last = recipe.training.last
        self._smoothing = recipe.task_options.label_smoothing
        self._format = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
        self._test = source.test_batches(recipe.training.eval_batch_size, device=device, memory_format=self._format)

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device) -> Self:
        try:
            source = data.load(recipe.data.name, recipe.data.root, recipe.data_options)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise DataError(str(error)) from error
        return cls(source, recipe, device)

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, memory_format=self._format)

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return self._source.train_batches(
            batch_size, seed=seed, device=self.device, last=self._last, memory_format=self._format
        )

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets, label_smoothing=self._smoothing)

    def size(self, batch: Batch) -> int:
        return len(batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        count = 0
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in self._test:
            scores: Any = model(images).float()
            correct = (scores.argmax(dim=1) == labels).sum()
            sums += torch.stack([correct, F.cross_entropy(scores, labels, reduction="sum")])
            count += len(labels)
        correct, loss = sums.tolist()
        return {"accuracy": 100 * correct / count, "loss": loss / count}
