"""CIFAR-10 and CIFAR-100, from either of the two layouts in which they are distributed.

==========  ==========================================  ==========================================
            binary                                      python (pickled; read by a restricted unpickler)
==========  ==========================================  ==========================================
CIFAR-10    ``cifar-10-batches-bin/data_batch_1..5.bin``  ``cifar-10-batches-py/data_batch_1..5``
            ``cifar-10-batches-bin/test_batch.bin``       ``cifar-10-batches-py/test_batch``
CIFAR-100   ``cifar-100-binary/train.bin, test.bin``      ``cifar-100-python/train, test``
==========  ==========================================  ==========================================
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llqr.lab.data.imageset import ImageSet, image_set
from llqr.lab.data.restricted_pickle import load_arrays

SIZE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIZE**2


@dataclass(frozen=True)
class Layout:
    """The files of one of the two data sets, and how a record starts."""

    title: str
    classes: int
    binary_folder: str
    python_folder: str
    train: Sequence[str]
    test: Sequence[str]
    label_bytes: int  # before the pixels of a binary record; the last of them is the (fine) label
    label_key: bytes  # in the pickled dict

    def files(self, root: Path, split: Sequence[str]) -> tuple[list[Path], bool]:
        """The files of a split and whether they are pickled; the error says what is expected where."""
        binary = [root / self.binary_folder / f"{name}.bin" for name in split]
        python = [root / self.python_folder / name for name in split]
        for paths, pickled in ((binary, False), (python, True)):
            if all(path.is_file() for path in paths):
                return paths, pickled
        names = ", ".join(split)
        raise FileNotFoundError(
            f"{self.title} was not found under {root.absolute()}: expected {self.binary_folder}/ holding {names} with "
            f"the suffix .bin, or {self.python_folder}/ holding {names}. Give the folder that "
            "contains one with --data-dir, or as data.root in a recipe."
        )


CIFAR10 = Layout(
    title="CIFAR-10",
    classes=10,
    binary_folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    train=[f"data_batch_{part}" for part in range(1, 6)],
    test=["test_batch"],
    label_bytes=1,
    label_key=b"labels",
)
CIFAR100 = Layout(
    title="CIFAR-100",
    classes=100,
    binary_folder="cifar-100-binary",
    python_folder="cifar-100-python",
    train=["train"],
    test=["test"],
    label_bytes=2,
    label_key=b"fine_labels",
)


def read_cifar(layout: Layout, root: Path) -> tuple[ImageSet, ImageSet]:
    """The training and the test split under ``root``."""
    splits = []
    for split, expected in ((layout.train, 50_000), (layout.test, 10_000)):
        paths, pickled = layout.files(root, split)
        parts = [read_pickled(path, layout) if pickled else read_binary(path, layout) for path in paths]
        pixels = np.concatenate([pixels for pixels, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        if len(labels) != expected:
            warnings.warn(
                f"{paths[0].parent} holds {len(labels)} images in {', '.join(path.name for path in paths)}; "
                f"the complete {layout.title} has {expected}.",
                stacklevel=2,
            )
        images = pixels.reshape(-1, CHANNELS, SIZE, SIZE).transpose(0, 2, 3, 1)
        splits.append(image_set(images, labels, layout.classes, paths[0].parent))
    return splits[0], splits[1]


def read_binary(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``(count, 3072)`` and labels of a binary file: records of label bytes and 3072 pixel bytes."""
    record = layout.label_bytes + PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % record:
        raise ValueError(
            f"{path} is damaged: its size must be a multiple of {record} bytes (one record), got {len(content)} bytes."
        )
    rows = content.reshape(-1, record)
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]


def read_pickled(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``(count, 3072)`` and labels of a pickled file: a dict with ``data`` and the label list."""
    content = load_arrays(path)
    entries = content if isinstance(content, dict) else {}
    # Python 2 wrote byte keys; a file that was pickled again may have text keys.
    entries = {key.encode() if isinstance(key, str) else key: value for key, value in entries.items()}
    pixels, labels = entries.get(b"data"), entries.get(layout.label_key)
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != PIXELS
        or not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) for label in labels)
    ):
        raise ValueError(
            f"{path} is damaged: expected a dict with 'data', uint8 of shape (count, {PIXELS}), and "
            f"'{layout.label_key.decode()}', a list of count integers."
        )
    return pixels, np.array(labels, dtype=np.int64)
