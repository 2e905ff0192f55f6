"""Symmetric label noise: a fraction of the training labels, chosen by a seed, changes to another class."""

import torch
from torch import Tensor


def corrupt_labels(labels: Tensor, classes: int, rate: float, seed: int) -> Tensor:
    """``labels`` with exactly ``round(rate * count)`` of them flipped.

    ``rate`` is the paper's gamma, "the fraction of randomly flipped training labels". A flip always changes the label:
    the new class is uniform over the ``classes - 1`` others, so that gamma is the fraction of *wrong* labels. (Where
    the true class may be drawn again, as in some other work, only ``gamma * (classes - 1) / classes`` are wrong.)
    """
    # Always on the CPU, so that a seed gives the same labels on every device.
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(rate * len(labels))]
    shift = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    corrupted = labels.clone()
    corrupted[chosen] = (labels[chosen] + shift) % classes
    return corrupted
