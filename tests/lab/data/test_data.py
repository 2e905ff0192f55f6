"""Reading data sets: small copies of the real layouts, label noise, and errors for missing and damaged files."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from llqr.lab import data
from llqr.lab.data.resident import corrupt_labels
from llqr.lab.data.streaming import random_scaled_box
from llqr.lab.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*the complete CIFAR:UserWarning")


def images_and_labels(count: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random images ``(count, 32, 32, 3)`` and labels."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), random.integers(0, classes, count)


def rows(images: np.ndarray) -> np.ndarray:
    """CIFAR's order: all red pixels, then all green ones, then all blue ones."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_cifar10(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """A tiny CIFAR-10, four images per file; returns the training images and labels."""
    images, labels = images_and_labels(20, 10)
    test_images, test_labels = images_and_labels(4, 10, seed=1)
    parts = [(f"data_batch_{i + 1}", images[4 * i : 4 * i + 4], labels[4 * i : 4 * i + 4]) for i in range(5)]
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(exist_ok=True)
    for name, x, y in [*parts, ("test_batch", test_images, test_labels)]:
        np.hstack([y[:, None].astype(np.uint8), rows(x)]).tofile(folder / f"{name}.bin")
    return images, labels


def write_cifar100(root: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = images_and_labels(8, 100)
    (root / "cifar-100-binary").mkdir(exist_ok=True)
    coarse = np.full_like(labels, 7)
    for name in ("train", "test"):
        record = np.hstack([coarse[:, None].astype(np.uint8), labels[:, None].astype(np.uint8), rows(images)])
        record.tofile(root / "cifar-100-binary" / f"{name}.bin")
    return images, labels


def write_folders(root: Path, size: int, ending: str, per_class: int = 3) -> None:
    """``train/<class>/`` and ``val/<class>/`` with images of a single colour per class."""
    for split in ("train", "val"):
        for index, name in enumerate(("n01", "n02")):
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                image = Image.new("RGB", (size + 8 * i, size), (100 * index, 50, 200))
                image.save(root / split / name / f"{name}_{i}.{ending}")


def write_tinyimagenet(root: Path) -> None:
    folder = root / "tiny-imagenet-200"
    wnids = ["n02", "n01"]  # not in alphabetical order: the labels are those of wnids.txt
    annotations = []
    for index, wnid in enumerate(wnids):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (64, 64), (90 * index, 10 * i, 5)).save(
                folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", quality=100
            )
        (folder / "val" / "images").mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64), 90 * index).save(folder / "val" / "images" / f"val_{index}.JPEG", quality=100)
        annotations.append(f"val_{index}.JPEG\t{wnid}\t0\t0\t63\t63\n")
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(reversed(annotations)))


def test_cifar10(tmp_path):
    images, labels = write_cifar10(tmp_path)
    loaded = data.load("cifar10", tmp_path)
    assert torch.equal(loaded.train.images, torch.from_numpy(images))
    assert torch.equal(loaded.train.labels, torch.from_numpy(labels))
    assert len(loaded.test) == 4
    assert loaded.train.images.shape[1:] == (32, 32, 3)


def test_cifar100_has_the_fine_labels(tmp_path):
    images, labels = write_cifar100(tmp_path)
    loaded = data.load("cifar100", tmp_path)
    assert torch.equal(loaded.train.images, torch.from_numpy(images))
    assert torch.equal(loaded.train.labels, torch.from_numpy(labels))


def test_an_incomplete_cifar_warns(tmp_path):
    write_cifar100(tmp_path)
    with pytest.warns(UserWarning, match=r"holds 8 images in train.bin; the complete CIFAR-100 has 50000"):
        data.load("cifar100", tmp_path)


def test_missing_cifar_says_what_is_expected_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 .*cifar-10-batches-bin/ holding data_batch_1.*data.root"):
        data.load("cifar10", tmp_path)
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match="CIFAR-10 was not found"):
        data.load("cifar10", tmp_path)


def test_damaged_cifar_names_the_file(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2.bin is damaged: .* multiple of 3073 bytes"):
        data.load("cifar10", tmp_path)
    path.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(ValueError, match=r"cifar-10-batches-bin is damaged: labels must lie in 0..9, found .*11"):
        data.load("cifar10", tmp_path)


def test_digits_are_embedded_and_have_a_fixed_split():
    first, second = data.load("digits"), data.load("digits")
    assert torch.equal(first.train.images, second.train.images)
    assert (len(first.train), len(first.test)) == (data.source("digits").train_count, 360)
    shares = first.test.labels.bincount() / first.train.labels.bincount()
    assert torch.allclose(shares, torch.full((10,), 0.25), atol=0.01)


def test_statistics_are_those_of_the_training_images(tmp_path):
    images, _ = write_cifar10(tmp_path)
    loaded = data.load("cifar10", tmp_path)
    pixels = images.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(loaded.mean, pixels.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(loaded.deviation, pixels.std(axis=0), rtol=1e-12)


def test_tinyimagenet_folders(tmp_path):
    write_tinyimagenet(tmp_path)
    loaded = data.load("tinyimagenet", tmp_path)
    assert loaded.train.images.shape == (4, 64, 64, 3)
    assert loaded.train.labels.tolist() == [0, 0, 1, 1]
    assert loaded.test.labels.tolist() == [1, 0]
    assert loaded.test.images[0].float().mean() == 90  # the annotation's file, a grey one made RGB
    (tmp_path / "tiny-imagenet-200" / "wnids.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"wnids.txt is missing. Expected tiny-imagenet-200/"):
        data.load("tinyimagenet", tmp_path)


def test_damaged_tinyimagenet_names_the_file(tmp_path):
    write_tinyimagenet(tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    picture = folder / "train" / "n01" / "images" / "n01_0.JPEG"
    picture.write_bytes(picture.read_bytes()[:100])
    with pytest.raises(DataError, match=r"n01_0.JPEG is not a readable image"):
        data.load("tinyimagenet", tmp_path)
    Image.new("RGB", (32, 64)).save(picture)
    with pytest.raises(ValueError, match=r"n01_0.JPEG is damaged: expected 64 x 64 pixels"):
        data.load("tinyimagenet", tmp_path)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\n")
    with pytest.raises(ValueError, match=r"val_annotations.txt is damaged: .*n99"):
        data.load("tinyimagenet", tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_imagenet_folders_are_streamed(tmp_path, workers):
    write_folders(tmp_path / "imagenet", size=40, ending="JPEG")
    loaded = data.load("imagenet", tmp_path, {"image_size": 16, "workers": workers})
    assert {label for _, label in loaded.train} == {0, 1}
    before = torch.get_rng_state()
    batches = loaded.train_batches(4, seed=0, last="keep")
    seen = [(images.clone(), labels) for images, labels in batches]
    assert [len(labels) for _, labels in seen] == [4, 2]
    assert sorted(torch.cat([labels for _, labels in seen]).tolist()) == [0, 0, 0, 1, 1, 1]
    for images, labels in seen:
        assert images.shape[1:] == (3, 16, 16)
        # Colours are flat, so that crops keep them: red is 0 or 100, normalised.
        expected = (100 * labels / 255 - 0.485) / 0.229
        torch.testing.assert_close(images[:, 0].mean(dim=(1, 2)), expected, atol=0.05, rtol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_streaming_resumes_in_the_middle_of_an_epoch(tmp_path):
    for label in range(2):
        for split in ("train", "val"):
            (tmp_path / "imagenet" / split / str(label)).mkdir(parents=True)
            for i in range(4):
                noise = np.random.default_rng(10 * label + i).integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(noise).save(tmp_path / "imagenet" / split / str(label) / f"{i}.JPEG")
    loaded = data.load("imagenet", tmp_path, {"image_size": 8, "workers": 0})
    whole = loaded.train_batches(3, seed=5)
    expected = [images for _ in range(2) for images, _ in whole]
    assert not torch.equal(expected[0], expected[3])
    broken = loaded.train_batches(3, seed=5)
    iterator = iter(broken)
    next(iterator), next(iterator)
    resumed = loaded.train_batches(3, seed=99)
    resumed.load_state_dict(broken.state_dict())
    rest = [images for _ in range(2) for images, _ in resumed]
    assert len(rest) == 4
    assert all(torch.equal(one, other) for one, other in zip(rest, expected[2:], strict=True))
    test = loaded.test_batches(3)
    assert [len(labels) for _, labels in test] == [3, 3, 2]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(test, test, strict=True))


def test_a_scaled_image_is_cropped_to_a_box_that_stays_inside():
    chance = random.Random(0)
    boxes = [random_scaled_box(500, 375, 224, (256, 480), chance) for _ in range(500)]
    sides = [right - left for left, _, right, _ in boxes]
    for left, top, right, bottom in boxes:
        assert right - left == pytest.approx(bottom - top)
        assert 0 <= left < right <= 500 + 1e-9
        assert 0 <= top < bottom <= 375 + 1e-9
    assert min(sides) == pytest.approx(224 * 375 / 480, rel=0.02)
    assert max(sides) == pytest.approx(224 * 375 / 256, rel=0.02)


def test_imagenet_can_be_scaled_to_a_random_size(tmp_path):
    write_folders(tmp_path / "imagenet", size=40, ending="JPEG")
    options = {"image_size": 16, "workers": 0}
    loaded = data.load("imagenet", tmp_path, options | {"shorter_side": (20, 60)})
    images, labels = next(iter(loaded.train_batches(6, seed=0)))
    assert images.shape == (6, 3, 16, 16)
    torch.testing.assert_close(
        images[:, 0].mean(dim=(1, 2)), (100 * labels / 255 - 0.485) / 0.229, atol=0.05, rtol=0
    )  # colours are flat
    with pytest.raises(
        ValueError, match=r"shorter_side must be two lengths in order, .*image_size = 16, got \[12, 20\]"
    ):
        data.load("imagenet", tmp_path, options | {"shorter_side": (12, 20)})


def test_missing_imagenet_says_what_is_expected_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"imagenet.train is missing: .*val/<class>/\*.JPEG.*data.root"):
        data.load("imagenet", tmp_path)
    write_folders(tmp_path / "imagenet", size=8, ending="JPEG")
    for path in (tmp_path / "imagenet" / "val" / "n02").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"val.n02 holds no images"):
        data.load("imagenet", tmp_path)


@given(
    count=st.integers(1, 300),
    classes=st.integers(2, 20),
    rate=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=50)
def test_noise_flips_exactly_the_requested_fraction(count, classes, rate, seed):
    labels = torch.arange(count) % classes
    noisy = corrupt_labels(labels, classes, rate, seed)
    assert int((noisy != labels).sum()) == round(rate * count)  # so no flip keeps the class
    assert int(noisy.min()) >= 0
    assert int(noisy.max()) < classes
    assert torch.equal(noisy, corrupt_labels(labels, classes, rate, seed))


def test_noise_is_uniform_over_the_other_classes():
    labels = torch.zeros(30_000, dtype=torch.int64)
    counts = corrupt_labels(labels, 4, 1.0, seed=0).bincount(minlength=4)
    assert counts[0] == 0
    # Three classes of 10,000 expected: 5 standard deviations are 5 sqrt(30000 * 1/3 * 2/3) < 410.
    assert (counts[1:] - 10_000).abs().max() < 410


def test_noise_leaves_the_test_set_alone(tmp_path):
    clean = data.load("digits")
    noisy = data.load("digits", options={"label_noise": 0.6})
    other = data.load("digits", options={"label_noise": 0.6, "noise_seed": 1})
    assert int((noisy.train.labels != clean.train.labels).sum()) == round(0.6 * 1437)
    assert not torch.equal(noisy.train.labels, other.train.labels)
    assert torch.equal(noisy.test.labels, clean.test.labels)


def test_images_held_out_are_training_images_that_no_batch_has():
    whole = data.load("digits", options={"label_noise": 0.5})
    parts = data.load("digits", options={"label_noise": 0.5, "validation": 200})

    def samples(images, labels):
        return sorted((image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True))

    assert len(parts.valid) == 200
    assert len(parts.train) == 1237
    images = torch.cat((parts.train.images, parts.valid.images))
    labels = torch.cat((parts.train.labels, parts.valid.labels))
    assert samples(images, labels) == samples(whole.train.images, whole.train.labels)
    assert torch.equal(parts.test.images, whole.test.images)
    (batch,) = parts.test_batches(200, split="valid")
    assert torch.equal(batch[1], parts.valid.labels)
    assert sum(len(labels) for _, labels in parts.train_batches(64, seed=0, last="keep")) == 1237


@pytest.mark.parametrize("noise_seed", [0, 1])
def test_labels_held_out_are_as_noisy_as_the_others(noise_seed):
    options = {"validation": 400, "noise_seed": noise_seed}
    noisy = data.load("digits", options=options | {"label_noise": 0.5})
    right = data.load("digits").train
    known = {image.numpy().tobytes(): int(label) for image, label in zip(right.images, right.labels, strict=True)}
    for part in (noisy.train, noisy.valid):
        pairs = zip(part.images, part.labels, strict=True)
        wrong = [known[image.numpy().tobytes()] != int(label) for image, label in pairs]
        assert abs(sum(wrong) / len(wrong) - 0.5) < 0.08


def test_bad_requests_name_the_argument():
    with pytest.raises(ValueError, match=re.escape("data must be one of digits, cifar10,")):
        data.load("mnist")
    with pytest.raises(TypeError, match="'crop'"):
        data.load("digits", options={"crop": 4})
    for options, message in [
        ({"label_noise": 1.5}, "label_noise must lie in"),
        ({"cutout": -1}, "cutout must not be negative"),
        ({"validation": -1}, "validation must not be negative"),
        ({"validation": 1437}, "validation must leave some of the 1437 images"),
        ({"cutout_probability": 2.0}, "cutout_probability must lie in"),
    ]:
        with pytest.raises(ValueError, match=message):
            data.load("digits", options=options)
