"""A folder of images is a data set for a model of your own."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from llqr.lab import ImageFolder, compare, models
from llqr.lab.data.decode import decode
from llqr.lab.errors import DataError
from llqr.lab.own.data import seeded


def write_images(folder, classes, count, size=12):
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 100, (size, size + 2, 3)) + 70 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


@pytest.fixture
def flowers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLQR_COMMIT", "none")
    write_images(tmp_path / "flowers", ("rose", "tulip"), 10)
    return tmp_path / "flowers"


def compared(folder, workers=0):
    train, test = ImageFolder(folder, 8, augmented=True), ImageFolder(folder, 8)
    model = partial(models.build, "cnn", classes=2, image_size=8, channels=3)
    given = {"model": model, "loss": nn.functional.cross_entropy, "train": train, "test": test, "workers": workers}
    return compare(**given, epochs=1, batch_size=8, methods=["sgdm"], seeds=1, device="cpu", samples=0, quiet=True)


def test_a_network_of_the_laboratory_is_trained_on_a_folder(flowers):
    result = compared(flowers).runs[0].result
    assert (result["metric"], result["steps"]) == ("accuracy", 3)


@pytest.mark.parametrize("ending", ["bmp", "GIF", "ppm", "tiff", "webp"])
def test_no_class_is_left_out_for_the_format_of_its_images(flowers, ending):
    (flowers / "lily").mkdir()
    for number in range(2):
        Image.open(flowers / "rose/0.png").save(flowers / f"lily/{number}.{ending}")
    train = ImageFolder(flowers, 8)
    assert train.classes == ["lily", "rose", "tulip"]
    assert train[0][0].shape == (3, 8, 8)


def test_images_are_looked_for_below_the_folder_of_a_class(flowers):
    """As torchvision's `ImageFolder` does, links to folders included, but without what is hidden."""
    expected = len(ImageFolder(flowers, 8)) + 4
    write_images(flowers / "rose", ("red", ".ipynb_checkpoints"), 2)
    write_images(flowers.parent, ("elsewhere",), 2)
    (flowers / "tulip/linked").symlink_to(flowers.parent / "elsewhere")
    (flowers / "rose/._1.png").write_bytes(b"what macOS leaves")
    train = ImageFolder(flowers, 8)
    assert (len(train), train.classes) == (expected, ["rose", "tulip"])


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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_in_one_sentence(flowers, workers, monkeypatch):
    # A loader whose worker failed waits so long for it when it is collected: otherwise 5 s, in some later test.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    (flowers / "rose/3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"rose/3.png is not a readable image: "):
        compared(flowers, workers)
    gc.collect()


def test_only_augmented_images_are_random_and_their_seed_decides(flowers):
    train, test = ImageFolder(flowers, 8, augmented=True), ImageFolder(flowers, 8)
    pixels, label = test[0]
    assert (pixels.shape, pixels.dtype, label) == ((3, 8, 8), torch.float32, 0)
    assert torch.equal(pixels, test[0][0])
    with seeded(1):
        first = train[0][0]
    with seeded(1):
        assert torch.equal(first, train[0][0])
        assert not torch.equal(first, train[0][0])


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        ImageFolder(tmp_path / "gone")
    with pytest.raises(DataError, match="at least two folders of images, one per class"):
        ImageFolder(tmp_path)


class Watched(nn.Conv2d):
    """Notes the memory format of what it is given and of its weights."""

    seen: set[tuple[bool, bool]] = set()

    def forward(self, image):
        self.seen.add(tuple(one.is_contiguous(memory_format=torch.channels_last) for one in (image, self.weight)))
        return super().forward(image).mean((2, 3))


@pytest.mark.parametrize("loader", [False, True])
def test_channels_last_is_how_images_and_weights_lie_in_memory(loader):
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, 4, 4), torch.arange(8) % 2)
    quick = {"epochs": 1, "methods": ["llqr+sam"], "seeds": 1, "device": "cpu", "samples": 0}
    train = [data[:4], data[4:]] if loader else data
    for setting in (False, True):
        Watched.seen = set()
        settings = {"training.channels_last": setting, "geometries.ngd.inner.steps": 2}
        given = {"model": Watched(3, 2, 3), "loss": nn.functional.cross_entropy, "train": train, "test": data}
        compare(**given, **quick, settings=settings, quiet=True)
        assert Watched.seen == {(setting, setting)}
