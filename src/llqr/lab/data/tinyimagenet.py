"""TinyImageNet-200 from its folders: 64 x 64 colour images, 200 classes, 100,000 for training and 10,000 for testing.

The labels of the official test images were never published, so the validation images serve as test set, as is usual.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from llqr.lab.data.decode import decode
from llqr.lab.data.imageset import ImageSet, image_set

FOLDER, SIZE, CLASSES = "tiny-imagenet-200", 64, 200


def read_tinyimagenet(root: Path) -> tuple[ImageSet, ImageSet]:
    """The training and the validation split of ``root/tiny-imagenet-200``, decoded with Pillow."""
    folder = root / FOLDER
    annotations = folder / "val" / "val_annotations.txt"
    for path in (folder / "wnids.txt", folder / "train", folder / "val" / "images", annotations):
        if not path.exists():
            raise FileNotFoundError(
                f"TinyImageNet was not found under {root.absolute()}: {path} is missing. Expected {FOLDER}/ holding "
                "wnids.txt, train/<wnid>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt. Give the "
                "folder that contains it with --data-dir, or as data.root in a recipe."
            )
    wnids = (folder / "wnids.txt").read_text().split()
    label_of = {wnid: label for label, wnid in enumerate(wnids)}

    train_paths = [path for wnid in wnids for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))]
    train_labels = [label_of[path.parent.parent.name] for path in train_paths]

    rows = [line.split("\t") for line in annotations.read_text().splitlines() if line]
    malformed = next((row for row in rows if len(row) < 2 or row[1] not in label_of), None)
    if malformed is not None:
        raise ValueError(f"{annotations} is damaged: {malformed!r} does not give a file and a class of wnids.txt.")
    test_paths = [folder / "val" / "images" / row[0] for row in rows]
    test_labels = [label_of[row[1]] for row in rows]
    return (
        image_set(decode_all(train_paths), np.array(train_labels), len(wnids), folder / "train"),
        image_set(decode_all(test_paths), np.array(test_labels), len(wnids), folder / "val"),
    )


def decode_all(paths: Sequence[Path]) -> np.ndarray:
    """All images as one array ``(count, 64, 64, 3)``; threads suffice because Pillow releases the GIL."""
    images = np.empty((len(paths), SIZE, SIZE, 3), dtype=np.uint8)

    def fill(index: int) -> None:
        image = decode(paths[index])
        if image.size != (SIZE, SIZE):
            raise ValueError(f"{paths[index]} is damaged: expected {SIZE} x {SIZE} pixels, got {image.size}.")
        images[index] = np.asarray(image)

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(fill, range(len(paths))):
            pass
    return images
