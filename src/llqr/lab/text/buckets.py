"""A few batch shapes that hold all sentence pairs with little padding.

Every shape costs a captured graph or a compilation, and every padded token costs time. So lengths are rounded up to a
grid, and shapes are merged, each time the two whose merging adds the fewest tokens to an epoch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llqr.lab.errors import ConfigurationError

Integers = npt.NDArray[np.int64]

GRID = 8
"""Lengths are multiples of this, for the matrix units of a GPU; so is the number of rows where possible."""


@dataclass(frozen=True, order=True)
class Shape:
    """The shape of a batch: ``rows`` pairs, padded to ``source`` and ``target`` tokens."""

    source: int
    target: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.source + self.target)


def rows_for(max_tokens: int, source: Integers, target: Integers) -> Integers:
    """The number of pairs that fit: the longer side, padded, has at most ``max_tokens`` tokens."""
    rows: Integers = max_tokens // np.maximum(source, target)
    return np.where(rows >= GRID, rows // GRID * GRID, rows)


def choose(source: Tensor, target: Tensor, max_tokens: int, count: int) -> tuple[list[Shape], Tensor]:
    """At most ``count`` shapes for sentences of these lengths, and the index of the shape of every pair.

    Lengths include the end token; either side of a batch has at most ``max_tokens``.
    """
    lengths = torch.stack([source, target], dim=1).numpy()
    # Near the limit, rounding up to the grid would make a pair too long that fits.
    rounded = np.minimum(-(-lengths // GRID) * GRID, np.maximum(max_tokens, 1))
    if lengths.max() > max_tokens:
        raise ConfigurationError(
            f"max_tokens must be at least {lengths.max()}, the length of the longest sentence, got {max_tokens}; in a "
            "recipe it is training.batch_size."
        )
    cells, amounts = np.unique(rounded, axis=0, return_counts=True)
    merged = _merge(cells, amounts, count, max_tokens)
    shapes = sorted(
        Shape(int(s), int(t), int(rows_for(max_tokens, np.array(s), np.array(t)))) for s, t in np.unique(merged, axis=0)
    )
    sizes = np.array([(shape.source, shape.target) for shape in shapes])
    fits = (rounded[:, None] <= sizes[None]).all(-1)
    belongs = np.where(fits, sizes.sum(-1), np.iinfo(np.int64).max).argmin(-1)
    used, belongs = np.unique(belongs, return_inverse=True)
    return [shapes[i] for i in used], torch.from_numpy(belongs)


def _merge(cells: Integers, amounts: Integers, count: int, max_tokens: int) -> Integers:
    """Merge the ``cells`` (source, target), which hold ``amounts`` pairs each, until ``count`` are left."""

    def cost(s: Integers, t: Integers, pairs: Integers) -> Integers:
        rows = rows_for(max_tokens, s, t)
        tokens: Integers = -(-pairs // rows) * rows * (s + t)
        return tokens

    while len(cells) > count:
        s, t = cells.T
        alone = cost(s, t, amounts)
        together = cost(np.maximum.outer(s, s), np.maximum.outer(t, t), np.add.outer(amounts, amounts))
        added = (together - np.add.outer(alone, alone)).astype(float)
        np.fill_diagonal(added, np.inf)
        a, b = np.unravel_index(added.argmin(), added.shape)
        cells[a] = np.maximum(cells[a], cells[b])
        amounts[a] += amounts[b]
        cells, amounts = np.delete(cells, b, axis=0), np.delete(amounts, b)
    return cells
