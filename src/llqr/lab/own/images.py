"""A folder of images, one folder per class, as data sets for an experiment."""

import random
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from llqr.lab.data.streaming import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Files,
    central_box,
    images_in,
    random_resized_box,
    square,
)
from llqr.lab.errors import DataError

HELD_OUT = ("val", "valid", "validation", "test")
ONE_IN = 5
"""Of the images of a folder without a test set, one in so many is held out."""


class FolderImages(Dataset[tuple[Tensor, int]]):
    """Normalised images ``(3, size, size)`` with their labels.

    Training images get a random resized crop and a flip, drawn from `random`; the others are scaled and cropped to the
    central square.
    """

    def __init__(self, files: Files, classes: list[str], size: int, *, augmented: bool) -> None:
        self.files, self.classes, self.size, self.augmented = files, classes, size, augmented

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        if self.augmented:
            box = partial(random_resized_box, chance=random.Random(random.getrandbits(32)))
            image = square(path, self.size, box, lambda: random.random() < 0.5)
        else:
            image = square(path, self.size, partial(central_box, fraction=1.0), lambda: False)
        return ((image - IMAGENET_MEAN) / IMAGENET_DEVIATION).permute(2, 0, 1).contiguous(), label


def image_folder(folder: Path | str, image_size: int = 64) -> tuple[FolderImages, FolderImages]:
    """Return the training and the test images of a folder.

    It holds ``train/<class>/*`` and ``val/<class>/*`` (or ``valid``, ``validation``, ``test``), or only ``<class>/*``;
    then one image in five of every class is held out, always the same ones.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder.")
    if (root / "train").is_dir():
        held_out = next((root / name for name in HELD_OUT if (root / name).is_dir()), None)
        if held_out is None:
            raise DataError(f"{root} has a folder train, but none of {', '.join(HELD_OUT)}.")
        classes = _classes(root / "train")
        if unknown := sorted(set(_classes(held_out)) - set(classes)):
            raise DataError(f"{held_out} has the class {unknown[0]}, which {root / 'train'} has not.")
        train, test = _files(root / "train", classes), _files(held_out, classes)
    else:
        classes = _classes(root)
        train, test = [], []
        for label, name in enumerate(classes):
            own = images_in(root / name)
            random.Random(0).shuffle(own)
            count = max(1, len(own) // ONE_IN)
            test += [(path, label) for path in sorted(own[:count])]
            train += [(path, label) for path in sorted(own[count:])]
    return (
        FolderImages(train, classes, image_size, augmented=True),
        FolderImages(test, classes, image_size, augmented=False),
    )


def _classes(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and images_in(path))
    if len(found) < 2:
        raise DataError(f"{folder} must hold at least two folders of images, one per class, and has {len(found)}.")
    return found


def _files(folder: Path, classes: list[str]) -> Files:
    return [(path, label) for label, name in enumerate(classes) for path in images_in(folder / name)]
