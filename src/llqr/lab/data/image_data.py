"""What every image data set offers: batches of its training and of its test images."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from llqr.lab.data.batches import Batches


class ImageData(ABC):
    """A training and a test set of images."""

    @property
    @abstractmethod
    def model_arguments(self) -> dict[str, Any]:
        """The arguments a network needs for this data."""

    def train_batches(
        self,
        batch_size: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        last: str = "fill",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Batches:
        """Shuffled, augmented batches; ``seed`` determines order and augmentation."""
        return self._batches(batch_size, seed, device, last, memory_format)

    def test_batches(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Batches:
        """All test images in order, each once; the last batch may be smaller."""
        return self._batches(batch_size, None, device, "keep", memory_format)

    @abstractmethod
    def _batches(
        self,
        batch_size: int,
        seed: int | None,
        device: torch.device | str,
        last: str,
        memory_format: torch.memory_format,
    ) -> Batches:
        """Training batches with a seed, test batches without one."""
