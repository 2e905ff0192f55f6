"""Image files: which ones are found, and how they are decoded."""

import numpy as np
import pytest
from PIL import Image

from llqr.lab.data.decode import decode
from llqr.lab.data.streaming import find_files
from llqr.lab.errors import DataError


def write_images(folder, classes, count):
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 255, (12, 14, 3)).astype(np.uint8)).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("ending", ["bmp", "GIF", "ppm", "tiff", "webp"])
def test_no_class_is_left_out_for_the_format_of_its_images(tmp_path, ending):
    write_images(tmp_path, ("rose",), 2)
    (tmp_path / "lily").mkdir()
    for number in range(2):
        Image.open(tmp_path / "rose/0.png").save(tmp_path / f"lily/{number}.{ending}")
    assert [label for _, label in find_files(tmp_path, ["lily", "rose"])] == [0, 0, 1, 1]


def test_images_are_looked_for_below_the_folder_of_a_class(tmp_path):
    """As torchvision's `ImageFolder` does, links to folders included, but without what is hidden."""
    write_images(tmp_path / "flowers", ("rose", "tulip"), 1)
    write_images(tmp_path / "flowers/rose", ("red", ".ipynb_checkpoints"), 2)
    write_images(tmp_path, ("elsewhere",), 2)
    (tmp_path / "flowers/tulip/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "flowers/rose/._1.png").write_bytes(b"what macOS leaves")
    assert [label for _, label in find_files(tmp_path / "flowers", ["rose", "tulip"])] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, ending):
    """Pillow cuts them off at 255, which is white."""
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(deep).save(tmp_path / f"deep.{ending}")
    assert np.array_equal(np.array(decode(tmp_path / f"deep.{ending}"))[:, :, 0], deep >> 8)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_images_of_unknown_scale_are_refused(tmp_path, kind):
    Image.fromarray(np.ones((4, 4), kind)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match=r"deep.tif has 32 bits per pixel, .*: save it with 8 or 16\."):
        decode(tmp_path / "deep.tif")
