"""Random crop, horizontal flip, normalisation and Cutout of whole batches, on the device of the images.

The order of operations is the usual one: the image is padded, cropped, flipped and normalised; then the Cutout square
is set to one colour.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class Draws(NamedTuple):
    """The random numbers of an epoch, one of each kind per sample; a slice of them belongs to a batch."""

    top: Tensor
    left: Tensor
    flip: Tensor
    hole_row: Tensor
    hole_column: Tensor


@dataclass(frozen=True)
class Augmentation:
    """Random crops after padding by ``crop_padding``, flips, and Cutout squares (DeVries & Taylor, 2017).

    The border is black or a reflection of the image, and every sample is shifted by itself, or all of a batch alike. A
    Cutout square of side ``cutout`` has its centre anywhere in the image, so that part of it may lie outside; it is
    applied to a sample with probability ``cutout_probability`` and filled with the mean colour or with black. By
    default nothing is augmented.
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    cutout_probability: float = 1.0
    crop_border: Literal["black", "reflect"] = "black"
    crop_per: Literal["sample", "batch"] = "sample"
    cutout_fill: Literal["mean", "black"] = "mean"

    def __post_init__(self) -> None:
        for name in ("crop_padding", "cutout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 <= self.cutout_probability <= 1:
            raise ValueError(f"cutout_probability must lie in [0, 1], got {self.cutout_probability}.")

    def pad(self, images: Tensor) -> Tensor:
        """Images ``(count, height, width, channels)``, on the host, with the border that the crops reach into."""
        border, size = self.crop_padding, min(images.shape[1:3])
        if self.crop_border == "black":
            return F.pad(images, (0, 0, border, border, border, border))
        if border >= size:
            raise ValueError(
                f"crop_padding must be smaller than the image, {size} pixels, to reflect it, got {border}."
            )
        # torch does not reflect bytes.
        return torch.from_numpy(np.pad(images.numpy(), [(0, 0), (border, border), (border, border), (0, 0)], "reflect"))

    def draw(self, count: int, height: int, width: int, generator: torch.Generator, batch_size: int = 1) -> Draws:
        """The random numbers for ``count`` samples; nothing is drawn for what is switched off."""
        device = generator.device

        def integers(high: int) -> Tensor:
            if high == 1:
                return torch.zeros(count, dtype=torch.int64, device=device)
            return torch.randint(high, (count,), generator=generator, device=device)

        row = integers(height if self.cutout else 1)
        if self.cutout_probability < 1:
            chosen = torch.rand(count, generator=generator, device=device) < self.cutout_probability
            row = torch.where(chosen, row, -2 * self.cutout - 1)  # so far outside that it covers no pixel
        top, left = integers(2 * self.crop_padding + 1), integers(2 * self.crop_padding + 1)
        if self.crop_per == "batch":
            first_of_batch = torch.arange(count, device=device) // batch_size * batch_size
            top, left = top[first_of_batch], left[first_of_batch]
        return Draws(top, left, integers(1 + self.flip).bool(), row, integers(width if self.cutout else 1))

    def apply(self, padded: Tensor, samples: Tensor, draws: Draws, scale: Tensor, shift: Tensor) -> Tensor:
        """Samples of ``padded`` as floats ``scale * pixel + shift``, shape ``(batch, height, width, channels)``.

        Crop and flip are one gather; nothing here waits for the device or loops over samples.
        """
        height, width = (size - 2 * self.crop_padding for size in padded.shape[1:3])
        y = torch.arange(height, device=padded.device)
        x = torch.arange(width, device=padded.device)
        rows = draws.top[:, None] + y
        columns = draws.left[:, None] + (torch.where(draws.flip[:, None], width - 1 - x, x) if self.flip else x)
        images = padded[samples[:, None, None], rows[:, :, None], columns[:, None, :]] * scale
        images += shift
        if self.cutout:
            hole = self._within(y, draws.hole_row)[:, :, None] & self._within(x, draws.hole_column)[:, None, :]
            images = torch.where(hole[..., None], shift if self.cutout_fill == "black" else 0.0, images)
        return images

    def _within(self, coordinate: Tensor, centre: Tensor) -> Tensor:
        """Which coordinates lie in ``[centre - cutout // 2, centre - cutout // 2 + cutout)``, for every sample."""
        offset = coordinate - (centre[:, None] - self.cutout // 2)
        return (offset >= 0) & (offset < self.cutout)
