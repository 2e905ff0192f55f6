"""Image classification: cross-entropy, top-1 accuracy in per cent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab import data, models
from llqr.lab.data import Batches, ImageData
from llqr.lab.errors import DataError
from llqr.lab.tasks.task import Batch, Task

if TYPE_CHECKING:
    from llqr.lab.config.run import Run


def validation_images(run: Run) -> int:
    """How many training images are held out; 0 for data that are streamed."""
    return int(getattr(run.data_options, "validation", 0))


class ClassificationTask(Task):
    """Images in, class scores out. The test loss is the plain cross-entropy, whatever the label smoothing."""

    metric = "accuracy"
    larger_is_better = True
    unit = "images"

    def __init__(self, source: ImageData, run: Run, device: torch.device) -> None:
        self.device = device
        self._source = source
        self._last = run.training.last
        self._smoothing = run.task_options.label_smoothing
        memory_format = torch.channels_last if run.training.channels_last else torch.contiguous_format
        self._placement: dict[str, Any] = {"device": device, "memory_format": memory_format}
        self.split = self.split_of(run)
        self._eval_batch_size = run.training.eval_batch_size
        self._evaluated = self._batches_of(self.split)

    def _batches_of(self, split: str) -> Batches:
        chosen = {} if split == "test" else {"split": split}
        return self._source.test_batches(self._eval_batch_size, **self._placement, **chosen)

    @classmethod
    def data_options(cls, name: str) -> type:
        return data.source(name).options

    @classmethod
    def build_model(cls, run: Run) -> nn.Module:
        needed = data.source(run.data.name).model_arguments(run.data_options)
        return models.build(run.model.name, **needed | run.model.options)

    @classmethod
    def steps_per_epoch(cls, run: Run) -> int:
        count, batch_size = data.source(run.data.name).train_count - validation_images(run), run.training.batch_size
        return count // batch_size if run.training.last == "drop" else -(-count // batch_size)

    @classmethod
    def split_of(cls, run: Run) -> Literal["test", "valid"]:
        return "valid" if validation_images(run) else "test"

    @classmethod
    def load(cls, run: Run, device: torch.device, seed: int) -> Self:
        try:
            source = data.load(run.data.name, run.data.root, run.data_options)
        except (OSError, ValueError) as error:
            raise DataError(str(error)) from error
        return cls(source, run, device)

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(**self._placement)

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return self._source.train_batches(batch_size, seed=seed, last=self._last, **self._placement)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets, label_smoothing=self._smoothing)

    def size(self, batch: Batch) -> int:
        return len(batch[1])

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        count = 0
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in self._evaluated if split == self.split else self._batches_of(split):
            scores = self.forward(model, images).float()
            correct = (scores.argmax(dim=1) == labels).sum()
            sums += torch.stack([correct, F.cross_entropy(scores, labels, reduction="sum")])
            count += len(labels)
        correct, loss = sums.tolist()
        return {"accuracy": 100 * correct / count, "loss": loss / count}
