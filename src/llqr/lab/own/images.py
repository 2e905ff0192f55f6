"""A folder of images, one folder per class, as a data set for an experiment."""

import random
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from llqr.lab.data.streaming import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    central_box,
    find_files,
    random_resized_box,
    square,
)
from llqr.lab.errors import DataError


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images ``folder/<class>/*``, normalised to ``(3, image_size, image_size)``, with their labels.

    They are scaled and cropped to the central square or, if ``augmented``, get a random resized crop and a flip, drawn
    from `random`. Images in folders below that of a class belong to it.

    Attributes:
        classes: the names of the classes; label `i` is `classes[i]`.
    """

    def __init__(self, folder: Path | str, image_size: int = 64, *, augmented: bool = False) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder.")
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        if len(self.classes) < 2:
            raise DataError(f"{root} must hold at least two folders of images, one per class.")
        self.files = find_files(root, self.classes)
        self.image_size, self.augmented = image_size, augmented

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        if self.augmented:
            box = partial(random_resized_box, chance=random.Random(random.getrandbits(32)))
            image = square(path, self.image_size, box, lambda: random.random() < 0.5)
        else:
            image = square(path, self.image_size, partial(central_box, fraction=1.0), lambda: False)
        return ((image - IMAGENET_MEAN) / IMAGENET_DEVIATION).permute(2, 0, 1).contiguous(), label
