"""Batches of sentence pairs, in a few shapes, made on the device.

A batch is ``((source, previous), targets)``, all int64 of shape (rows, length). ``source`` and ``targets`` end
with the end-of-sentence token; ``previous`` is ``targets`` shifted right by one, and starts with the begin-of-sentence
token. The rest is padding, which the loss ignores; where a batch has fewer pairs than rows, whole rows are padding.

Every shape costs a captured graph or a compilation, and every padded token costs time. So lengths are rounded up to a
grid, and shapes are merged, each time the two whose merging adds the fewest tokens to an epoch.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError
from llqr.lab.text.prepared import SentencePairs
from llqr.lab.text.subwords import BOS, PAD

Integers = npt.NDArray[np.int64]
GRID = 8
"""Lengths are multiples of this, for the matrix units of a GPU; so is the number of rows where possible."""
SHAPES = 8
COVERED = 0.99
FILLER = -1
"""Marks a row of padding in a list of pair indices."""


class Shape(NamedTuple):
    """The shape of a batch: ``rows`` pairs, padded to ``source`` and ``target`` tokens."""

    source: int
    target: int
    rows: int


class PairBatches(Batches):
    """Batches of given shapes; ``belongs`` is the index of the shape of every pair, negative for pairs left out.

    Every other pair appears once per epoch. The pairs of a shape are distributed evenly over its batches, so that no
    batch is left with only a few. The seed determines the order of every epoch; without one there are the same batches
    every time, and no state. All randomness is drawn on the CPU, so that every device sees the same batches.
    """

    def __init__(
        self,
        pairs: SentencePairs,
        shapes: Sequence[Shape],
        belongs: Tensor,
        *,
        batch_size: int,
        seed: int | None,
        device: torch.device | str,
    ) -> None:
        kept = (belongs >= 0).nonzero()[:, 0]
        super().__init__(len(kept), batch_size, seed=seed, last="keep")
        self.shapes, self.device = shapes, torch.device(device)
        self._belongs = belongs[kept]
        amounts = torch.bincount(self._belongs, minlength=len(shapes)).tolist()
        self._batches = [-(-amount // shape.rows) for amount, shape in zip(amounts, shapes, strict=True)]
        self._shape_of_batch = [shape for shape, count in zip(shapes, self._batches, strict=True) for _ in range(count)]
        self.steps = self.position = len(self._shape_of_batch)
        self._batch_order = torch.arange(self.steps)
        self._source, self._target = (
            padded([side[i] for i in kept.tolist()] + [torch.tensor([PAD], dtype=torch.int32)], longest).to(device)
            for side, longest in (
                (pairs.source, max(shape.source for shape in shapes)),
                (pairs.target, max(shape.target for shape in shapes)),
            )
        )

    def _extended(self, order: Tensor) -> Tensor:
        """The pairs batch by batch, sorted by shape, with `FILLER` in the remaining rows."""
        belongs = self._belongs[order]
        return torch.cat(
            [
                F.pad(part, (0, shape.rows - len(part)), value=FILLER)
                for number, (shape, batches) in enumerate(zip(self.shapes, self._batches, strict=True))
                for part in order[belongs == number].tensor_split(batches)
            ]
        )

    def _draw(self, total: int) -> None:
        self._batch_order = torch.randperm(self.steps, generator=self.generator)

    def _produce(self, order: Tensor, first: int) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        # One copy to the device per epoch; FILLER, -1, indexes the last row of both matrices, which is padding.
        rows = order.to(self.device).split([shape.rows for shape in self._shape_of_batch])
        for batch in self._batch_order[first:].tolist():
            shape = self._shape_of_batch[batch]
            source = self._source[:, : shape.source][rows[batch]].long()
            targets = self._target[:, : shape.target][rows[batch]].long()
            previous = torch.cat([torch.full_like(targets[:, :1], BOS), targets[:, :-1]], dim=1)
            yield (source, previous.masked_fill(targets == PAD, PAD)), targets

    def _described(self) -> dict[str, Any]:
        return {"shapes": [list(shape) for shape in self.shapes]} | super()._described()


def token_batches(
    pairs: SentencePairs,
    max_tokens: int,
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    shapes: int = SHAPES,
) -> PairBatches:
    """Batches of at most so many tokens on either side, padding included, like fairseq's ``--max-tokens``."""
    chosen, belongs = choose(pairs.lengths, max_tokens, shapes)
    return PairBatches(pairs, chosen, belongs, batch_size=max_tokens, seed=seed, device=device)


def sentence_batches(
    pairs: SentencePairs, sentences: int, *, seed: int | None = None, device: torch.device | str = "cpu"
) -> PairBatches:
    """Batches of a fixed number of pairs, all of one shape, as a captured refresh of the metric needs.

    The shape holds the fraction `COVERED` of the pairs. The few longer ones are left out: they would make every batch
    as long as the longest sentence of the corpus.
    """
    lengths = pairs.lengths
    longer_side = lengths.amax(dim=1)
    held = longer_side <= longer_side.sort().values[math.ceil(COVERED * len(pairs)) - 1]
    source, target = (-(-lengths[held].amax(dim=0) // GRID) * GRID).tolist()
    belongs = torch.where(held, 0, -1)
    shape = Shape(source, target, sentences)
    return PairBatches(pairs, [shape], belongs, batch_size=sentences, seed=seed, device=device)


def decoding_batches(
    sentences: Sequence[Tensor], max_tokens: int, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[list[int], Tensor]]:
    """Source sentences for a decoder, sorted by length, each with its index in the data.

    Yields ``(places, source)``: a list of sentence indices, and an int64 matrix with one row for each, of at most
    ``max_tokens`` with its padding; a longer sentence gets its own batch.
    """
    # The longest first, so that running out of memory shows at once.
    order = sorted(range(len(sentences)), key=lambda place: -len(sentences[place]))
    while order:
        length = -(-len(sentences[order[0]]) // GRID) * GRID
        rows = max(1, max_tokens // length)
        places, order = order[:rows], order[rows:]
        yield places, padded([sentences[place] for place in places], length).to(device, torch.int64)


def padded(sentences: Sequence[Tensor], length: int) -> Tensor:
    """The sentences as an int32 matrix of ``length`` columns."""
    matrix = pad_sequence(list(sentences), batch_first=True, padding_value=PAD)
    return F.pad(matrix, (0, length - matrix.shape[1]), value=PAD)


def choose(lengths: Tensor, max_tokens: int, count: int) -> tuple[list[Shape], Tensor]:
    """At most ``count`` shapes for pairs of these ``lengths`` (pairs, 2), and the index of the shape of every pair."""
    if lengths.max() > max_tokens:
        raise ConfigurationError(
            f"max_tokens must be at least {lengths.max()}, the length of the longest sentence, got {max_tokens}; in a "
            "recipe it is training.batch_size."
        )
    # Near the limit, rounding up to the grid would make a pair too long that fits.
    rounded = np.minimum(-(-lengths.numpy() // GRID) * GRID, max_tokens)
    cells, amounts = np.unique(rounded, axis=0, return_counts=True)
    sizes = np.unique(_merge(cells, amounts, count, max_tokens), axis=0)
    fits = (rounded[:, None] <= sizes[None]).all(-1)
    belongs = np.where(fits, sizes.sum(-1), np.iinfo(np.int64).max).argmin(-1)
    used, belongs = np.unique(belongs, return_inverse=True)
    rows = _rows(max_tokens, *sizes[used].T)
    return [Shape(*map(int, one)) for one in zip(*sizes[used].T, rows, strict=True)], torch.from_numpy(belongs)


def _merge(cells: Integers, amounts: Integers, count: int, max_tokens: int) -> Integers:
    """Merge the ``cells`` (source, target), which hold ``amounts`` pairs each, until ``count`` are left."""

    def cost(s: Integers, t: Integers, pairs: Integers) -> Integers:
        rows = _rows(max_tokens, s, t)
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


def _rows(max_tokens: int, source: Integers, target: Integers) -> Integers:
    """The number of pairs that fit: the longer side, padded, has at most ``max_tokens`` tokens."""
    rows: Integers = max_tokens // np.maximum(source, target)
    return np.where(rows >= GRID, rows // GRID * GRID, rows)
