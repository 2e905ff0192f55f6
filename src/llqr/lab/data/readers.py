"""Read the small image sets from their files into memory: CIFAR, TinyImageNet, and scikit-learn's digits."""

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llqr.lab.errors import DataError

if TYPE_CHECKING:
    import PIL.Image

Files = list[tuple[Path, int]]
"""The images of one split, with their labels."""
WHERE = "Give the folder that contains it with --data-dir, or as data.root in a recipe."


@dataclass(frozen=True)
class ImageSet:
    """Images as uint8 ``(count, height, width, channels)`` and their labels as int64 ``(count,)``."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray, classes: int, source: object) -> "ImageSet":
        """From arrays; an error names ``source``."""
        if len(images) == 0:
            raise ValueError(f"{source} holds no images.")
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(
                f"{source} is damaged: labels must lie in 0..{classes - 1}, found {labels.min()}..{labels.max()}."
            )
        return cls(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64)))

    def __len__(self) -> int:
        return len(self.labels)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Exact mean and standard deviation per channel, from a histogram, in units of the stored numbers."""
        values = torch.arange(256, dtype=torch.float64)
        counts = torch.stack([one.flatten().bincount(minlength=256) for one in self.images.unbind(dim=3)]).double()
        shares = counts / counts.sum(dim=1, keepdim=True)
        mean = shares @ values
        deviation = (shares * (values - mean[:, None]) ** 2).sum(dim=1).sqrt()
        return mean, torch.where(deviation > 0, deviation, 1.0)  # a constant channel must not be divided by zero


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets in the "binary version" in which it is distributed.

    A record is ``label_bytes`` bytes, of which the last is the (fine) label, and 3072 bytes of pixels.
    """

    title: str
    classes: int
    folder: str
    train: Sequence[str]
    test: str
    label_bytes: int

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """The training and the test split under ``root``."""
        return self._split(root / self.folder, self.train, 50_000), self._split(root / self.folder, [self.test], 10_000)

    def _split(self, folder: Path, names: Sequence[str], expected: int) -> ImageSet:
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.title} was not found under {folder.parent.absolute()}: expected {self.folder}/ holding "
                f"{', '.join(names)}, but {missing[0]} is missing. {WHERE}"
            )
        rows = np.concatenate([self._records(folder / name) for name in names])
        if len(rows) != expected:
            warnings.warn(
                f"{folder} holds {len(rows)} images in {', '.join(names)}; the complete {self.title} has {expected}.",
                stacklevel=2,
            )
        images = rows[:, self.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return ImageSet.of(images, rows[:, self.label_bytes - 1], self.classes, folder)

    def _records(self, path: Path) -> np.ndarray:
        content, size = np.fromfile(path, dtype=np.uint8), self.label_bytes + 3072
        if len(content) == 0 or len(content) % size:
            raise ValueError(
                f"{path} is damaged: its size must be a multiple of {size} bytes (one record), got {len(content)}."
            )
        return content.reshape(-1, size)


CIFAR10 = Cifar(
    "CIFAR-10", 10, "cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin", 1
)
CIFAR100 = Cifar("CIFAR-100", 100, "cifar-100-binary", ["train.bin"], "test.bin", 2)


def read_digits(root: Path) -> tuple[ImageSet, ImageSet]:
    """1797 digits of 8 x 8 pixels from 0 to 16 that come with scikit-learn, in a fixed, stratified split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, bunch.target, test_size=0.2, random_state=0, stratify=bunch.target
    )
    return ImageSet.of(train_x, train_y, 10, "digits"), ImageSet.of(test_x, test_y, 10, "digits")


def find_files(folder: Path, classes: list[str], images: str = "*.JPEG") -> Files:
    """Every image below ``folder``, which has one folder per class with files like ``images`` in it."""
    files: Files = []
    for label, name in enumerate(classes):
        found = sorted((folder / name).glob(images))
        if not found:
            raise FileNotFoundError(f"{folder / name} holds no images {images}.")
        files += [(path, label) for path in found]
    return files


def read_tinyimagenet(root: Path) -> tuple[ImageSet, ImageSet]:
    """The training and the validation images of ``root/tiny-imagenet-200``, 64 x 64 pixels, 200 classes.

    The labels of the official test images were never published; as usual, the validation images serve as test set.
    """
    folder = root / "tiny-imagenet-200"
    annotations = folder / "val" / "val_annotations.txt"
    for path in (folder / "wnids.txt", folder / "train", folder / "val" / "images", annotations):
        if not path.exists():
            raise FileNotFoundError(
                f"TinyImageNet was not found under {root.absolute()}: {path} is missing. Expected {folder.name}/ "
                "holding wnids.txt, train/<wnid>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt. "
                f"{WHERE}"
            )
    wnids = (folder / "wnids.txt").read_text().split()
    train = find_files(folder / "train", wnids, "images/*.JPEG")
    test = []
    for line in annotations.read_text().splitlines():
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in wnids:
            raise ValueError(f"{annotations} is damaged: {line!r} does not give a file and a class of wnids.txt.")
        test.append((folder / "val" / "images" / name, wnids.index(wnid)))
    splits = (
        ImageSet.of(_decoded([path for path, _ in split]), np.array([label for _, label in split]), len(wnids), folder)
        for split in (train, test)
    )
    return next(splits), next(splits)


def decode(path: Path) -> "PIL.Image.Image":
    """The image at ``path`` in RGB, fully read; errors name the file."""
    from PIL import Image

    try:
        if not path.is_file():  # a pipe need not end
            raise ValueError("it is not a file")
        with Image.open(path) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            return image.convert("RGB")
    # Pillow reports damage as OSError, SyntaxError or ValueError, depending on the format.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable image: {error}.") from error


def _decoded(paths: Sequence[Path]) -> np.ndarray:
    """All images as one array ``(count, 64, 64, 3)``; threads suffice because Pillow releases the GIL."""

    def pixels(path: Path) -> np.ndarray:
        image = decode(path)
        if image.size != (64, 64):
            raise ValueError(f"{path} is damaged: expected 64 x 64 pixels, got {image.size}.")
        return np.asarray(image)

    images = np.empty((len(paths), 64, 64, 3), dtype=np.uint8)
    with ThreadPoolExecutor() as pool:
        for image, read in zip(images, pool.map(pixels, paths), strict=True):
            image[:] = read
    return images
