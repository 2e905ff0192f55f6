"""Data sets small enough to live on the device as one uint8 tensor: batches without workers or copies."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.lab.data.augment import Augmentation, Draws
from llqr.lab.data.batches import Batches, ImageData
from llqr.lab.data.readers import ImageSet

# Several batches are made at a time, so that they share the dozen kernels of an augmentation.
BYTES_AT_ONCE = 64 * 2**20


@dataclass(frozen=True)
class ResidentOptions(Augmentation):
    """Options of a resident data set: its augmentation and the noise of its training labels."""

    label_noise: float = 0.0
    noise_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"label_noise must lie in [0, 1], got {self.label_noise}.")


class ResidentBatches(Batches):
    """Batches of float images ``(batch, channels, height, width)`` and int64 labels, made on ``device``.

    With a seed they are training images, shuffled and augmented; without one, test images.
    """

    def __init__(
        self,
        source: "ResidentData",
        batch_size: int,
        seed: int | None,
        last: str,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        data = source.test if seed is None else source.train
        super().__init__(len(data), batch_size, seed=seed, last=last, drawn_on=device)
        self.memory_format = memory_format
        self.augmentation = source.options if self.shuffle else Augmentation()
        self._height, self._width, channels = data.images.shape[1:]
        self._images = self.augmentation.pad(data.images).to(device)
        self._labels = data.labels.to(device)
        self._scale = (1 / source.deviation).to(device, torch.float32)
        self._shift = (-source.mean / source.deviation).to(device, torch.float32)
        batch_bytes = batch_size * self._height * self._width * channels * torch.float32.itemsize
        self._batches_at_once = max(1, BYTES_AT_ONCE // batch_bytes)

    def _draw(self, total: int) -> None:
        self._draws = self.augmentation.draw(total, self._height, self._width, self.generator, self.batch_size)

    def _produce(self, order: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = order.to(self._labels.device)
        for start in range(first, self.steps, self._batches_at_once):
            stop = min(start + self._batches_at_once, self.steps)
            part = slice(start * self.batch_size, min(stop * self.batch_size, len(order)))
            images, labels = self._make(order[part], part)
            yield from zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True)

    def _make(self, samples: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        if self.shuffle:
            draws = Draws(*(numbers[part] for numbers in self._draws))
            images = self.augmentation.apply(self._images, samples, draws, self._scale, self._shift)
        else:
            images = self._images[samples] * self._scale
            images += self._shift
        # Viewed as (batch, channels, height, width), the images are already in channels-last format.
        return images.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format), self._labels[samples]


def corrupt_labels(labels: Tensor, classes: int, rate: float, seed: int) -> Tensor:
    """``labels`` with exactly ``round(rate * count)`` of them flipped.

    ``rate`` is the paper's gamma, "the fraction of randomly flipped training labels". A flip always changes the label:
    the new class is uniform over the ``classes - 1`` others, so that gamma is the fraction of *wrong* labels. (Where
    the true class may be drawn again, as in some other work, only ``gamma * (classes - 1) / classes`` are wrong.)
    """
    # Always on the CPU, so that a seed gives the same labels on every device.
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(rate * len(labels))]
    shift = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    corrupted = labels.clone()
    corrupted[chosen] = (labels[chosen] + shift) % classes
    return corrupted


class ResidentData(ImageData):
    """A training and a test set in memory, normalised by the statistics of the training images."""

    _batches = ResidentBatches

    def __init__(self, train: ImageSet, test: ImageSet, classes: int, options: ResidentOptions) -> None:
        self.options = options
        self.mean, self.deviation = train.statistics()
        labels = corrupt_labels(train.labels, classes, options.label_noise, options.noise_seed)
        self.train = ImageSet(train.images, labels)
        self.test = test
