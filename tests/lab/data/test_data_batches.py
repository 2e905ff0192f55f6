"""Batches of resident data: augmentation against a plain loop, order, last batches, and resuming in mid-epoch."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llqr.lab.data import resident
from llqr.lab.data.readers import ImageSet
from llqr.lab.data.resident import Augmentation, ResidentBatches, ResidentData, ResidentOptions


def image_set(count: int, size: int = 6, channels: int = 2) -> ImageSet:
    """Images whose pixels all differ (up to 255), and labels that number the samples."""
    pixels = torch.arange(count * size * size * channels).remainder(255).add(1).to(torch.uint8)
    return ImageSet(pixels.reshape(count, size, size, channels), torch.arange(count))


def batches(count: int = 10, batch_size: int = 4, seed: int = 0, last: str = "fill", **options) -> ResidentBatches:
    images = image_set(count)
    return ResidentData(images, images, count, ResidentOptions(**options)).train_batches(
        batch_size, seed=seed, last=last
    )


def reference(image, top, left, flip, hole_row, hole_column, augmentation, mean, deviation):
    """One sample by slicing: pad, crop, flip, normalise, cut out."""
    border = augmentation.crop_padding
    height, width, channels = image.shape
    if augmentation.crop_border == "reflect":
        padded = torch.from_numpy(np.pad(image.double().numpy(), [(border, border)] * 2 + [(0, 0)], mode="reflect"))
    else:
        padded = torch.zeros(height + 2 * border, width + 2 * border, channels, dtype=torch.float64)
        padded[border : border + height, border : border + width] = image
    crop = padded[top : top + height, left : left + width]
    if flip:
        crop = crop.flip(1)
    result = (crop - mean) / deviation
    if augmentation.cutout:
        y, x = hole_row - augmentation.cutout // 2, hole_column - augmentation.cutout // 2
        result = result.clone()
        colour = -mean / deviation if augmentation.cutout_fill == "black" else 0
        result[max(y, 0) : max(y + augmentation.cutout, 0), max(x, 0) : max(x + augmentation.cutout, 0)] = colour
    return result


@given(
    padding=st.integers(0, 4),
    flip=st.booleans(),
    cutout=st.integers(0, 7),
    probability=st.sampled_from([0.0, 0.5, 1.0]),
    border=st.sampled_from(["black", "reflect"]),
    per=st.sampled_from(["sample", "batch"]),
    fill=st.sampled_from(["mean", "black"]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=100)
def test_augmentation_equals_a_plain_loop(padding, flip, cutout, probability, border, per, fill, seed):
    data = image_set(9)
    augmentation = Augmentation(padding, flip, cutout, probability, border, per, fill)
    mean, deviation = (t.double() for t in data.statistics())
    samples = torch.tensor([3, 0, 8, 8, 1])
    draws = augmentation.draw(5, 6, 6, torch.Generator().manual_seed(seed), batch_size=2)
    made = augmentation.apply(augmentation.pad(data.images), samples, draws, 1 / deviation, -mean / deviation)
    for i, sample in enumerate(samples):
        numbers = (int(t[i]) for t in (draws.top, draws.left, draws.flip, draws.hole_row, draws.hole_column))
        expected = reference(data.images[sample], *numbers, augmentation, mean, deviation)
        torch.testing.assert_close(made[i], expected, rtol=0, atol=1e-12)


def test_draws_take_every_allowed_value_and_no_other():
    draws = Augmentation(crop_padding=4, flip=True, cutout=16).draw(5000, 32, 32, torch.Generator().manual_seed(0))
    assert draws.top.unique().tolist() == draws.left.unique().tolist() == list(range(9))
    assert draws.hole_row.unique().tolist() == draws.hole_column.unique().tolist() == list(range(32))
    assert abs(draws.flip.double().mean() - 0.5) < 5 * 0.5 / 5000**0.5


@pytest.mark.parametrize("last", ["fill", "drop", "keep"])
def test_all_samples_of_a_batch_can_be_shifted_alike(last):
    loader = batches(count=30, batch_size=4, last=last, crop_padding=3, crop_per="batch", flip=True)
    next(iter(loader))
    draws = loader._draws
    for shifts in (draws.top, draws.left):
        of_batches = [part.unique().tolist() for part in shifts.split(4)]
        assert all(len(values) == 1 for values in of_batches)
        assert len({values[0] for values in of_batches}) > 1
    assert any(len(part.unique()) == 2 for part in draws.flip.split(4))  # flips are still drawn for each sample


def test_options_leave_the_other_random_numbers_alone():
    """So that one seed gives the same flips and the same squares whatever the border and the colours are."""
    plain, other = (
        Augmentation(crop_padding=2, flip=True, cutout=3, **options).draw(12, 6, 6, torch.Generator().manual_seed(1), 4)
        for options in ({}, {"crop_border": "reflect", "crop_per": "batch", "cutout_fill": "black"})
    )
    for name in ("flip", "hole_row", "hole_column"):
        assert torch.equal(getattr(plain, name), getattr(other, name))
    assert torch.equal(plain.top[::4], other.top[::4])


def test_cutout_probability_is_the_share_of_samples_with_a_hole():
    augmentation = Augmentation(cutout=4, cutout_probability=0.25)
    draws = augmentation.draw(4000, 8, 8, torch.Generator().manual_seed(0))
    ones = torch.ones(1, 8, 8, 1, dtype=torch.uint8)
    made = augmentation.apply(ones, torch.zeros(4000, dtype=torch.int64), draws, torch.ones(1), torch.zeros(1))
    share = (made == 0).flatten(1).any(dim=1).double().mean()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


@pytest.mark.parametrize(("last", "sizes"), [("fill", [4, 4, 4]), ("drop", [4, 4]), ("keep", [4, 4, 2])])
def test_last_batch_policies(last, sizes):
    loader = batches(last=last)
    epoch = [labels for _, labels in loader]
    assert [len(labels) for labels in epoch] == sizes
    assert len(loader) == len(sizes)
    seen = torch.cat(epoch)
    counts = seen.bincount(minlength=10)
    if last == "fill":
        assert counts.min() == 1
        assert torch.equal(seen[10:], seen[:2])  # filled up from the start of the order
    elif last == "drop":
        assert counts.max() == 1
    else:
        assert counts.tolist() == [1] * 10


def test_a_batch_larger_than_the_data_is_filled():
    (_, labels), *rest = batches(count=3, batch_size=8)
    assert rest == []
    assert sorted(labels.bincount().tolist()) == [2, 3, 3]


def test_epochs_differ_and_seeds_repeat():
    options = {"crop_padding": 1, "flip": True, "cutout": 2}
    loader = batches(**options)
    first, second = ([images for images, _ in loader] for _ in range(2))
    again = [images for images, _ in batches(**options)]
    other = [images for images, _ in batches(seed=1, **options)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert not torch.equal(torch.cat(first), torch.cat(other))


def test_the_number_of_batches_made_at_once_does_not_matter(monkeypatch):
    options = {"count": 30, "crop_padding": 1, "flip": True, "cutout": 2, "last": "keep"}
    together = [(images, labels) for images, labels in batches(**options)]
    monkeypatch.setattr(resident, "BYTES_AT_ONCE", 1)
    one_by_one = [(images, labels) for images, labels in batches(**options)]
    for (x, y), (a, b) in zip(together, one_by_one, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


@given(stop=st.integers(0, 9), last=st.sampled_from(["fill", "drop", "keep"]))
@settings(deadline=None, max_examples=30)
def test_a_saved_state_resumes_with_the_next_batch(stop, last):
    options = {"crop_padding": 1, "flip": True, "cutout": 2, "last": last}
    whole = batches(**options)
    expected = [batch for _ in range(5) for batch in whole]

    interrupted = batches(**options)
    taken = 0
    while taken < stop:
        for _ in interrupted:
            taken += 1
            if taken == stop:
                break
    file = io.BytesIO()
    torch.save(interrupted.state_dict(), file)
    file.seek(0)
    resumed = batches(seed=77, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    rest = []
    while len(rest) < len(expected) - stop:
        rest += list(resumed)
    for (x, y), (a, b) in zip(rest, expected[stop:], strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    assert resumed.epoch == whole.epoch


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for _ in batches(crop_padding=1, flip=True, cutout=2):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batches_have_the_requested_memory_format(memory_format):
    data = image_set(10)
    held = ResidentData(data, data, 10, ResidentOptions(crop_padding=1))
    for loader in (
        held.train_batches(4, seed=0, memory_format=memory_format),
        held.test_batches(4, memory_format=memory_format),
    ):
        images, _ = next(iter(loader))
        assert images.shape == (4, 2, 6, 6)
        assert images.is_contiguous(memory_format=memory_format)


def test_test_batches_hold_every_sample_in_order():
    data = image_set(10)
    held = ResidentData(data, data, 10, ResidentOptions(crop_padding=1, flip=True, cutout=2))
    loader = held.test_batches(4)
    next(iter(loader))  # an abandoned iteration leaves no trace
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert labels.tolist() == list(range(10))
    expected = (data.images.double() - held.mean) / held.deviation
    torch.testing.assert_close(images.double(), expected.permute(0, 3, 1, 2), rtol=0, atol=1e-5)


def test_later_batches_do_not_overwrite_earlier_ones():
    loader = batches(crop_padding=1)
    kept = [(images, images.clone()) for images, _ in loader]
    assert all(torch.equal(images, copy) for images, copy in kept)


def test_a_constant_channel_is_not_divided_by_zero():
    data = ImageSet(torch.full((4, 2, 2, 1), 7, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    images, _ = next(iter(ResidentData(data, data, 1, ResidentOptions()).test_batches(4)))
    assert images.abs().max() == 0


def test_bad_requests_name_the_argument():
    with pytest.raises(ValueError, match="batch_size must be at most the 10 samples"):
        batches(batch_size=11, last="drop")
    with pytest.raises(ValueError, match="crop_padding must be smaller than the image, 6 pixels, to reflect it, got 6"):
        batches(crop_padding=6, crop_border="reflect")
    with pytest.raises(ValueError, match="had batch_size=5, this one has 4"):
        batches().load_state_dict(batches(batch_size=5).state_dict())
    state = batches().state_dict()
    state["generator"] = state["generator"][:16]  # a CUDA generator's state has another size
    with pytest.raises(ValueError, match="another kind of device"):
        batches().load_state_dict(state)
