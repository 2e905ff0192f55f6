"""What every image data set offers: batches of its training and of its test images."""

from abc import ABC, abstractmethod
from typing import TypedDict, Unpack

import torch

from llqr.lab.data.batches import Batches


class Placement(TypedDict, total=False):
    """Where the images of a batch are made, and their memory format."""

    device: torch.device | str
    memory_format: torch.memory_format


class ImageData(ABC):
    """A training and a test set of images."""

    def train_batches(
        self, batch_size: int, *, seed: int, last: str = "fill", **placement: Unpack[Placement]
    ) -> Batches:
        """Shuffled, augmented batches; ``seed`` determines order and augmentation."""
        return self._batches(batch_size, seed, last, **placement)

    def test_batches(self, batch_size: int, **placement: Unpack[Placement]) -> Batches:
        """All test images in order, each once; the last batch may be smaller."""
        return self._batches(batch_size, None, "keep", **placement)

    @abstractmethod
    def _batches(self, batch_size: int, seed: int | None, last: str, **placement: Unpack[Placement]) -> Batches:
        """Training batches with a seed, test batches without one."""
