"""Batches of sentence pairs, in a few shapes, made on the device.

A batch is ``(inputs, targets)`` with ``inputs = (source, previous)``. All three are int64 of shape (rows, length).
``source`` and ``targets`` end with the end-of-sentence token; ``previous`` is ``targets`` shifted right by one, and
starts with the begin-of-sentence token. The rest is padding, which the loss ignores; where a batch has fewer pairs than
its shape has rows, whole rows are padding.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llqr.lab.data.batches import Batches
from llqr.lab.text.buckets import GRID, Shape, choose
from llqr.lab.text.sentences import SentencePairs, Sentences
from llqr.lab.text.subwords import BOS, EOS, PAD

SHAPES = 8
FILLER = -1
"""Marks a row of padding in a list of pair indices."""

PairBatch = tuple[tuple[Tensor, Tensor], Tensor]


class ShapedBatches(Batches):
    """Batches of given shapes; ``belongs`` is the index of the shape of every pair.

    Every pair appears once per epoch. The pairs of a shape are distributed evenly over its batches, so that no batch
    is left with only a few. The seed determines the order of every epoch; without one there are the same batches every
    time, and no state. All randomness is drawn on the CPU, so that every device sees the same batches.
    """

    def __init__(
        self,
        pairs: SentencePairs,
        shapes: list[Shape],
        belongs: Tensor,
        *,
        batch_size: int,
        seed: int | None,
        device: torch.device | str,
    ) -> None:
        super().__init__(len(pairs), batch_size, seed=seed, last="keep")
        self.shapes, self.device = shapes, torch.device(device)
        self._belongs = belongs
        self._real = _spread(torch.bincount(belongs, minlength=len(shapes)).tolist(), [shape.rows for shape in shapes])
        self._shape_of_batch = [number for number, counts in enumerate(self._real) for _ in counts]
        rows = torch.tensor([shapes[number].rows for number in self._shape_of_batch])
        self._stop = rows.cumsum(0).tolist()  # where the rows of each batch end in the order of an epoch
        self.steps = self.position = len(self._shape_of_batch)
        self._batch_order = torch.arange(self.steps)
        self._local = torch.empty_like(belongs)  # the index of a pair among those of its shape
        self._source, self._target = [], []
        for number, shape in enumerate(shapes):
            members = (belongs == number).nonzero()[:, 0]
            self._local[members] = torch.arange(len(members))
            self._source.append(_resident(pairs.source, members, shape.source).to(self.device))
            self._target.append(_resident(pairs.target, members, shape.target).to(self.device))

    @property
    def padding(self) -> float:
        """The fraction of all tokens of an epoch, on both sides, that are padding."""
        handed_out = sum(self.shapes[number].tokens for number in self._shape_of_batch)
        real = sum(int((matrix != PAD).sum()) for matrix in (*self._source, *self._target))
        return 1 - real / handed_out

    def _extended(self, order: Tensor) -> Tensor:
        """The pairs batch by batch, sorted by shape, with `FILLER` in the remaining rows."""
        by_shape = order[self._belongs[order].argsort(stable=True)]
        parts, start = [], 0
        for number, counts in enumerate(self._real):
            for count in counts:
                filler = by_shape.new_full((self.shapes[number].rows - count,), FILLER)
                parts += [by_shape[start : start + count], filler]
                start += count
        return torch.cat(parts)

    def _draw(self, total: int) -> None:
        self._batch_order = torch.randperm(self.steps, generator=self.generator)

    def _produce(self, order: Tensor, first: int) -> Iterator[PairBatch]:
        # One copy to the device per epoch; FILLER, -1, indexes the last row of every matrix, which is padding.
        local = torch.where(order == FILLER, FILLER, self._local[order]).to(self.device)
        for batch in self._batch_order[first:].tolist():
            number = self._shape_of_batch[batch]
            stop = self._stop[batch]
            rows = local[stop - self.shapes[number].rows : stop]
            yield pair_batch(self._source[number][rows], self._target[number][rows])

    def _described(self) -> dict[str, Any]:
        shapes = [[shape.rows, shape.source, shape.target] for shape in self.shapes]
        return {"shapes": shapes} | super()._described()


class TokenBatches(ShapedBatches):
    """Batches of at most so many tokens on either side, padding included, like fairseq's ``--max-tokens``."""

    def __init__(
        self,
        pairs: SentencePairs,
        max_tokens: int,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        shapes: int = SHAPES,
    ) -> None:
        chosen, belongs = choose(pairs.source.lengths + 1, pairs.target.lengths + 1, max_tokens, shapes)
        super().__init__(pairs, chosen, belongs, batch_size=max_tokens, seed=seed, device=device)


class SentenceBatches(ShapedBatches):
    """Batches of a fixed number of pairs, all of one shape, as a captured refresh of the metric needs.

    The shape holds the fraction ``covered`` of the pairs. The few longer ones are left out: they would make every batch
    as long as the longest sentence of the corpus. `left_out` is their number.
    """

    def __init__(
        self,
        pairs: SentencePairs,
        sentences: int,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        covered: float = 0.99,
    ) -> None:
        lengths = torch.stack([pairs.source.lengths, pairs.target.lengths]) + 1
        longer_side = lengths.max(dim=0).values.sort().values
        longest = int(longer_side[math.ceil(covered * len(pairs)) - 1])
        held = (lengths <= longest).all(dim=0).nonzero()[:, 0]
        self.left_out = len(pairs) - len(held)
        source, target = (-(-int(side[held].max()) // GRID) * GRID for side in lengths)
        kept = pairs.select(held) if self.left_out else pairs
        belongs = torch.zeros(len(kept), dtype=torch.int64)
        shape = Shape(source, target, sentences)
        super().__init__(kept, [shape], belongs, batch_size=sentences, seed=seed, device=device)


def decoding_batches(
    sentences: Sentences, max_tokens: int, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[list[int], Tensor]]:
    """Source sentences for a decoder, sorted by length, each with its index in the data.

    Yields ``(places, source)``: a list of sentence indices, and an int64 matrix with one row for each, of at most
    ``max_tokens`` with its padding; a longer sentence gets its own batch.
    """
    lengths = sentences.lengths + 1
    # The longest first, so that running out of memory shows at once.
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        length = -(-int(lengths[order[0]]) // GRID) * GRID
        rows = max(1, max_tokens // length)
        places, order = order[:rows], order[rows:]
        yield places.tolist(), sentences.padded(places, length, pad=PAD, end=EOS).to(device, torch.int64)


def pair_batch(source: Tensor, target: Tensor) -> PairBatch:
    """The batch of padded int32 matrices ``source`` and ``target``, whose rows end with the end token."""
    targets = target.long()
    previous = torch.cat([torch.full_like(targets[:, :1], BOS), targets[:, :-1]], dim=1)
    return (source.long(), previous.masked_fill(targets == PAD, PAD)), targets


def _resident(sentences: Sentences, members: Tensor, length: int) -> Tensor:
    """The padded matrix of some sentences, followed by one row of padding."""
    matrix = sentences.padded(members, length, pad=PAD, end=EOS)
    return torch.cat([matrix, torch.full((1, length), PAD, dtype=torch.int32)])


def _spread(amounts: list[int], rows: list[int]) -> list[list[int]]:
    """For every shape the numbers of real pairs in its batches: as few batches as possible, as equal as possible."""
    spread = []
    for amount, most in zip(amounts, rows, strict=True):
        batches = -(-amount // most)
        spread.append([amount // batches + (i < amount % batches) for i in range(batches)])
    return spread
