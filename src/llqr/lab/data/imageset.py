"""Images in memory: a small data set after reading."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images as uint8 ``(count, height, width, channels)`` and their labels as int64 ``(count,)``."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Exact mean and standard deviation per channel, from a histogram, in units of the stored numbers."""
        values = np.arange(256, dtype=np.float64)
        means, deviations = [], []
        for channel in self.images.unbind(dim=3):
            counts = torch.bincount(channel.flatten(), minlength=256).numpy()
            mean = np.average(values, weights=counts)
            means.append(mean)
            deviations.append(np.sqrt(np.average((values - mean) ** 2, weights=counts)))
        # A constant channel must not be divided by zero.
        deviation = torch.tensor(deviations, dtype=torch.float64)
        return torch.tensor(means, dtype=torch.float64), torch.where(deviation > 0, deviation, 1.0)


def image_set(images: np.ndarray, labels: np.ndarray, classes: int, source: object) -> ImageSet:
    """An `ImageSet` of arrays ``(count, height, width, channels)`` and ``(count,)``; errors name ``source``."""
    if len(images) == 0:
        raise ValueError(f"{source} holds no images.")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"{source} is damaged: labels must lie in 0..{classes - 1}, found {labels.min()}..{labels.max()}."
        )
    return ImageSet(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64)))
