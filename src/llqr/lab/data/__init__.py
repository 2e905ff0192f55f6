"""Data sets by name.

>>> from llqr.lab import data
>>> digits = data.load("digits")
>>> for images, labels in digits.train_batches(64, seed=0): ...

Small sets live on the device (`resident`), ImageNet is streamed from its files (`streaming`). Both return `Batches`:
the same seed gives the same batches, and a saved state resumes in the middle of an epoch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llqr.lab.data.batches import Batches, ImageData
from llqr.lab.data.readers import CIFAR10, CIFAR100, ImageSet, read_digits, read_tinyimagenet
from llqr.lab.data.resident import ResidentData, ResidentOptions
from llqr.lab.data.streaming import StreamingData, StreamingOptions
from llqr.lab.names import check_known

__all__ = ["Batches", "ImageData", "ResidentData", "Source", "StreamingData", "load", "source"]


@dataclass(frozen=True)
class Source:
    """The sizes of a data set, which are known before any file is read, and how to read it."""

    classes: int
    image_size: int
    channels: int
    train_count: int
    options: type
    read: Callable[[Path, Any], ImageData]

    def model_arguments(self, options: Any) -> dict[str, Any]:
        """The arguments a network needs for this data; an option may change the image size."""
        size = getattr(options, "image_size", self.image_size)
        return {"classes": self.classes, "image_size": size, "channels": self.channels}


def in_memory(
    classes: int, image_size: int, channels: int, train_count: int, read: Callable[[Path], tuple[ImageSet, ImageSet]]
) -> Source:
    """A data set whose two splits ``read`` returns."""
    sizes = classes, image_size, channels, train_count
    return Source(*sizes, ResidentOptions, lambda root, options: ResidentData(*read(root), classes, options))


SOURCES = {
    "digits": in_memory(10, 8, 1, 1437, read_digits),
    "cifar10": in_memory(10, 32, 3, 50_000, CIFAR10.read),
    "cifar100": in_memory(100, 32, 3, 50_000, CIFAR100.read),
    "tinyimagenet": in_memory(200, 64, 3, 100_000, read_tinyimagenet),
    "imagenet": Source(
        1000, 224, 3, 1_281_167, StreamingOptions, lambda root, options: StreamingData(root / "imagenet", options)
    ),
}


def source(name: str) -> Source:
    """What is known about the data set ``name`` without reading it."""
    check_known("data", name, SOURCES)
    return SOURCES[name]


def load(name: str, root: Path | str = "data", options: Mapping[str, Any] | Any = None) -> ImageData:
    """Read the data set ``name`` below ``root``; ``options`` is a mapping or an instance of its options class."""
    known = source(name)
    if options is None or isinstance(options, Mapping):
        options = known.options(**(options or {}))
    return known.read(Path(root), options)
