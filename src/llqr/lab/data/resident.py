"""Data sets small enough to live on the device as one uint8 tensor: batches without workers or copies.

Whole batches are augmented where they are, in the usual order: the image is padded, cropped, flipped and normalised;
then the Cutout square is set to one colour.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llqr.lab.data.batches import Batches, ImageData
from llqr.lab.data.readers import ImageSet

# Several batches are made at a time, so that they share the dozen kernels of an augmentation.
BYTES_AT_ONCE = 64 * 2**20


class Draws(NamedTuple):
    """The random numbers of an epoch, one of each kind per sample; a slice of them belongs to a batch."""

    top: Tensor
    left: Tensor
    flip: Tensor
    hole_row: Tensor
    hole_column: Tensor


@dataclass(frozen=True)
class Augmentation:
    """Random crops after padding by ``crop_padding``, flips, and Cutout squares (DeVries & Taylor, 2017).

    The border is black or a reflection of the image, and every sample is shifted by itself, or all of a batch alike. A
    Cutout square of side ``cutout`` has its centre anywhere in the image, so that part of it may lie outside; it is
    applied to a sample with probability ``cutout_probability`` and filled with the mean colour or with black. By
    default nothing is augmented.
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    cutout_probability: float = 1.0
    crop_border: Literal["black", "reflect"] = "black"
    crop_per: Literal["sample", "batch"] = "sample"
    cutout_fill: Literal["mean", "black"] = "mean"

    def __post_init__(self) -> None:
        for name in ("crop_padding", "cutout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 <= self.cutout_probability <= 1:
            raise ValueError(f"cutout_probability must lie in [0, 1], got {self.cutout_probability}.")

    def pad(self, images: Tensor) -> Tensor:
        """Images ``(count, height, width, channels)``, on the host, with the border that the crops reach into."""
        border, size = self.crop_padding, min(images.shape[1:3])
        if self.crop_border == "black":
            return F.pad(images, (0, 0, border, border, border, border))
        if border >= size:
            raise ValueError(
                f"crop_padding must be smaller than the image, {size} pixels, to reflect it, got {border}."
            )
        # torch does not reflect bytes.
        return torch.from_numpy(np.pad(images.numpy(), [(0, 0), (border, border), (border, border), (0, 0)], "reflect"))

    def draw(self, count: int, height: int, width: int, generator: torch.Generator, batch_size: int = 1) -> Draws:
        """The random numbers for ``count`` samples; nothing is drawn for what is switched off."""
        device = generator.device

        def integers(high: int) -> Tensor:
            if high == 1:
                return torch.zeros(count, dtype=torch.int64, device=device)
            return torch.randint(high, (count,), generator=generator, device=device)

        row = integers(height if self.cutout else 1)
        if self.cutout_probability < 1:
            chosen = torch.rand(count, generator=generator, device=device) < self.cutout_probability
            row = torch.where(chosen, row, -2 * self.cutout - 1)  # so far outside that it covers no pixel
        top, left = integers(2 * self.crop_padding + 1), integers(2 * self.crop_padding + 1)
        if self.crop_per == "batch":
            first_of_batch = torch.arange(count, device=device) // batch_size * batch_size
            top, left = top[first_of_batch], left[first_of_batch]
        return Draws(top, left, integers(1 + self.flip).bool(), row, integers(width if self.cutout else 1))

    def apply(self, padded: Tensor, samples: Tensor, draws: Draws, scale: Tensor, shift: Tensor) -> Tensor:
        """Samples of ``padded`` as floats ``scale * pixel + shift``, shape ``(batch, height, width, channels)``.

        Crop and flip are one gather; nothing here waits for the device or loops over samples.
        """
        height, width = (size - 2 * self.crop_padding for size in padded.shape[1:3])
        y = torch.arange(height, device=padded.device)
        x = torch.arange(width, device=padded.device)
        rows = draws.top[:, None] + y
        columns = draws.left[:, None] + (torch.where(draws.flip[:, None], width - 1 - x, x) if self.flip else x)
        images = padded[samples[:, None, None], rows[:, :, None], columns[:, None, :]] * scale
        images += shift
        if self.cutout:
            hole = self._within(y, draws.hole_row)[:, :, None] & self._within(x, draws.hole_column)[:, None, :]
            images = torch.where(hole[..., None], shift if self.cutout_fill == "black" else 0.0, images)
        return images

    def _within(self, coordinate: Tensor, centre: Tensor) -> Tensor:
        """Which coordinates lie in ``[centre - cutout // 2, centre - cutout // 2 + cutout)``, for every sample."""
        offset = coordinate - (centre[:, None] - self.cutout // 2)
        return (offset >= 0) & (offset < self.cutout)


@dataclass(frozen=True)
class ResidentOptions(Augmentation):
    """Options of a resident data set: its augmentation and the noise of its training labels.

    ``validation`` training images are held out, the same ones in every run with these options; evaluations measure on
    these, and the test set is read once, at the end. Their labels are as noisy as those of the others.
    """

    label_noise: float = 0.0
    noise_seed: int = 0
    validation: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"label_noise must lie in [0, 1], got {self.label_noise}.")
        if self.validation < 0:
            raise ValueError(f"validation must not be negative, got {self.validation}.")


class ResidentBatches(Batches):
    """Batches of float images ``(batch, channels, height, width)`` and int64 labels, made on ``device``.

    With a seed they are training images, shuffled and augmented; without one, those of ``split``, test or valid.
    """

    def __init__(
        self,
        source: "ResidentData",
        batch_size: int,
        seed: int | None,
        last: str,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
        split: str = "test",
    ) -> None:
        data = source.train if seed is not None else source.test if split == "test" else source.valid
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
        if options.validation >= len(train):
            raise ValueError(f"validation must leave some of the {len(train)} images, got {options.validation}.")
        # With wrong labels another order than the one that chose these: otherwise all labels held out would be wrong.
        seed = options.noise_seed + 1 if options.label_noise else 0
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        held_out, rest = order[: options.validation], order[options.validation :].sort().values
        self.train = ImageSet(train.images[rest], labels[rest])
        self.valid, self.test = ImageSet(train.images[held_out], labels[held_out]), test
