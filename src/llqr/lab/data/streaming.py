"""Image folders too large for memory: worker processes decode the files while the device computes.

Layout: ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``. Training images get a random crop and a flip; test images
the central square, 224/256 of the shorter side. Pillow decodes.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from llqr.lab.data.batches import Batches, ImageData
from llqr.lab.data.readers import Files, decode, find_files
from llqr.lab.machine import cores

# The usual statistics of ImageNet, scaled to bytes.
IMAGENET_MEAN = 255 * torch.tensor([0.485, 0.456, 0.406])
IMAGENET_DEVIATION = 255 * torch.tensor([0.229, 0.224, 0.225])
CENTRAL = 224 / 256

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class StreamingOptions:
    """The side of the square that images become, and the processes that read them.

    With ``shorter_side = [from, to]`` a training image is scaled to a random length of its shorter side and cropped
    (Simonyan & Zisserman, 2015) instead of getting a random resized crop.
    """

    image_size: int = 224
    workers: int = 8
    shorter_side: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {self.image_size}.")
        if self.workers < 0:
            raise ValueError(f"workers must not be negative, got {self.workers}.")
        if self.shorter_side is not None and not self.image_size <= self.shorter_side[0] <= self.shorter_side[1]:
            raise ValueError(
                f"shorter_side must be two lengths in order, of at least image_size = {self.image_size}, "
                f"got {list(self.shorter_side)}."
            )


def random_resized_box(width: int, height: int, chance: random.Random) -> Box:
    """A box of 8 to 100 % of the area with an aspect ratio between 3/4 and 4/3, or the central square if none fits."""
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = chance.uniform(0, width - w), chance.uniform(0, height - h)
            return left, top, left + w, top + h
    return central_box(width, height, 1.0)


def random_scaled_box(width: int, height: int, size: int, sides: tuple[int, int], chance: random.Random) -> Box:
    """The box that is a random crop of ``size`` pixels once the shorter side is scaled to one of ``sides``."""
    side = size * min(width, height) / chance.randint(*sides)
    left, top = chance.uniform(0, width - side), chance.uniform(0, height - side)
    return left, top, left + side, top + side


def central_box(width: int, height: int, fraction: float) -> Box:
    """The central square whose side is ``fraction`` of the shorter side."""
    side = fraction * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class DecodedImages(Dataset[tuple[Tensor, int]]):
    """Images by ``(index, seed)``, as bytes; the seed determines crop and flip, no seed means the central crop."""

    def __init__(self, files: Files, options: StreamingOptions) -> None:
        self.files, self.size, self.shorter_side = files, options.image_size, options.shorter_side

    def __getitem__(self, request: tuple[int, int | None]) -> tuple[Tensor, int]:
        from PIL.Image import Resampling, Transpose

        index, seed = request
        path, label = self.files[index]
        image, chance = decode(path), random.Random(seed)
        if seed is None:
            box = central_box(*image.size, CENTRAL)
        elif self.shorter_side is None:
            box = random_resized_box(*image.size, chance)
        else:
            box = random_scaled_box(*image.size, self.size, self.shorter_side, chance)
        image = image.resize((self.size, self.size), Resampling.BILINEAR, box=box)
        if seed is not None and chance.random() < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)), label


class StreamingBatches(Batches):
    """Batches of float images ``(batch, 3, size, size)`` and int64 labels on ``device``, decoded on demand."""

    def __init__(
        self,
        source: "StreamingData",
        batch_size: int,
        seed: int | None,
        last: str,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        files, options = source.test if seed is None else source.train, source.options
        super().__init__(len(files), batch_size, seed=seed, last=last)  # drawn on the CPU, alike for every device
        self.device, self.options, self.memory_format = torch.device(device), options, memory_format
        self._data = DecodedImages(files, options)
        self._scale = (1 / IMAGENET_DEVIATION).to(device)
        self._shift = (-IMAGENET_MEAN / IMAGENET_DEVIATION).to(device)

    def _draw(self, total: int) -> None:
        self._seeds = torch.randint(2**62, (total,), generator=self.generator, device=self.generator.device)

    def _produce(self, order: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        samples = order[first * self.batch_size :].tolist()
        seeds = self._seeds[first * self.batch_size :].tolist() if self.shuffle else [None] * len(samples)
        requests = list(zip(samples, seeds, strict=True))
        loader = DataLoader(
            self._data,
            batch_sampler=[requests[i : i + self.batch_size] for i in range(0, len(requests), self.batch_size)],
            num_workers=min(self.options.workers, cores()),  # torch warns of more, in every epoch
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # otherwise it would draw from the global generator
        )
        for images, labels in loader:
            pixels = images.to(self.device, non_blocking=True) * self._scale
            pixels += self._shift
            made = pixels.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
            yield made, labels.to(self.device, non_blocking=True)


class StreamingData(ImageData):
    """A training and a test set of image files under ``folder``."""

    _batches = StreamingBatches

    def __init__(self, folder: Path, options: StreamingOptions) -> None:
        for split in ("train", "val"):
            if not (folder / split).is_dir():
                raise FileNotFoundError(
                    f"{folder / split} is missing: expected {folder.name}/ to hold train/<class>/*.JPEG and "
                    "val/<class>/*.JPEG. Give the folder that contains it with --data-dir, or as data.root in a recipe."
                )
        self.options = options
        classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
        self.train = find_files(folder / "train", classes)
        self.test = find_files(folder / "val", classes)
