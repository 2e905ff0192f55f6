"""A folder of images, one folder per class, as data sets and as an experiment with a network of the laboratory."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from llqr.lab import models
from llqr.lab.data.streaming import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    FileOptions,
    Files,
    central_box,
    images_in,
    random_resized_box,
    square,
)
from llqr.lab.errors import DataError
from llqr.lab.machine import cores
from llqr.lab.tasks.own import fingerprint
from llqr.lab.tasks.own.experiment import Experiment
from llqr.lab.tasks.own.task import OwnTask

if TYPE_CHECKING:
    from llqr.lab.config.run import Run

TRAIN = "train"
HELD_OUT = ("val", "valid", "validation", "test")
PARTS = (TRAIN, "training", *HELD_OUT, "testing", "dev", "eval")
"""Names of folders that, in any case, are hardly those of classes."""
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


def image_folder(folder: Path | str, image_size: int = FileOptions.image_size) -> tuple[FolderImages, FolderImages]:
    """The training and the test images of a folder.

    It holds ``train/<class>/*`` and ``val/<class>/*`` (or ``valid``, ``validation``, ``test``), or only ``<class>/*``;
    then one image in five of every class is held out, always the same ones. The folder of a class may hold others.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder.")
    held_out = next((root / name for name in HELD_OUT if (root / name).is_dir()), None)
    if (root / TRAIN).is_dir():
        if held_out is None:
            raise DataError(f"{root} has a folder train, but none of {', '.join(HELD_OUT)}.")
        classes = _classes(root / TRAIN)
        unknown = sorted(set(_classes(held_out)) - set(classes))
        if unknown:
            raise DataError(f"{held_out} has the class {unknown[0]}, which {root / TRAIN} has not.")
        train, test = _files(root / TRAIN, classes), _files(held_out, classes)
    else:
        classes = _classes(root)
        _check_for_parts(root, classes)
        train, test = _divided(root, classes)
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


def _check_for_parts(root: Path, classes: list[str]) -> None:
    """Refuse to take the parts of the data for classes: folders with such a name, and with folders of images."""
    for name in classes:
        if name.lower() in PARTS and all(path.parent != root / name for path in images_in(root / name)):
            raise DataError(
                f"{root} has the folder {name}, which looks like a part of the data and not like a class: the parts "
                f"must be called {TRAIN} and one of {', '.join(HELD_OUT)}."
            )


def _divided(root: Path, classes: list[str]) -> tuple[Files, Files]:
    """One in so many of every class is held out: at least one, and not the only one."""
    train: Files = []
    test: Files = []
    for label, name in enumerate(classes):
        own = images_in(root / name)
        if len(own) < 2:
            raise DataError(f"{root / name} must hold at least two images, one of which is held out.")
        random.Random(0).shuffle(own)
        count = max(1, len(own) // ONE_IN)
        test += [(path, label) for path in sorted(own[:count])]
        train += [(path, label) for path in sorted(own[count:])]
    return train, test


def digest(folder: Path) -> str:
    """Changes with the names and sizes of the images."""
    train, test = image_folder(folder)
    files = [*train.files, *test.files]
    return fingerprint.of_texts(f"{path.relative_to(folder)} {path.stat().st_size}" for path, _ in files)


def experiment(folder: Path, options: FileOptions, model: str, model_options: dict[str, object]) -> Experiment:
    """A network of the laboratory on the images of a folder."""
    train, test = image_folder(folder, options.image_size)
    sizes = {"classes": len(train.classes), "image_size": options.image_size, "channels": 3}
    return Experiment(
        model=partial(models.build, model, **sizes | model_options),
        loss=F.cross_entropy,
        train=train,
        test=test,
        workers=min(options.workers, cores()),  # torch warns of more, in every epoch
        title=f"{folder.name}: {len(train):,} images of {len(train.classes)} classes",
    )


class ImageFolderTask(OwnTask):
    """The classes of a folder of images, learned by a network of the laboratory."""

    @classmethod
    def data_options(cls, name: str) -> type:
        return FileOptions

    @classmethod
    def experiment_of(cls, run: Run, seed: int) -> Experiment:
        folder = Path(run.data.root)
        made = experiment(folder, run.data_options, run.model.name, run.model.options)
        if digest(folder) != run.task_options.digest:
            raise DataError(f"The images in {folder} have changed since the run was made.")
        return made
