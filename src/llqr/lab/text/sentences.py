"""Token sequences of different lengths in one tensor, and pairs of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sentences:
    """Sentence ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, without begin and end tokens.

    Attributes:
        tokens: int32, all sentences concatenated.
        offsets: int64, one entry more than there are sentences.
    """

    tokens: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "Sentences":
        """Sentences from lists of tokens."""
        offsets = torch.tensor([0, *accumulate(len(one) for one in lists)], dtype=torch.int64)
        return cls(torch.tensor([token for one in lists for token in one], dtype=torch.int32), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be less than the number of sentences, {len(self)}, got {index}.")
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].tolist()

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sentence, int64."""
        return self.offsets.diff()

    def select(self, rows: Tensor) -> "Sentences":
        """The sentences ``rows``, in that order."""
        lengths = self.lengths[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
        return Sentences(self.tokens[self.offsets[rows].repeat_interleave(lengths) + within], offsets)

    def padded(self, rows: Tensor, length: int, *, pad: int, end: int) -> Tensor:
        """The sentences ``rows`` as an int32 matrix of ``length`` columns: tokens, ``end``, then ``pad``."""
        starts, counts = self.offsets[rows], self.lengths[rows]
        if len(rows) and int(counts.max()) >= length:
            raise ValueError(f"length must be at least {int(counts.max()) + 1} to hold every sentence, got {length}.")
        column = torch.arange(length)
        made = torch.full((len(rows), length), pad, dtype=torch.int32)
        inside = column < counts[:, None]
        made[inside] = self.tokens[(starts[:, None] + column)[inside]]
        made[column == counts[:, None]] = end
        return made


@dataclass(frozen=True)
class SentencePairs:
    """Parallel sentences: what to translate, and the translations.

    For validation and test the ``references`` are the translations before tokenisation and lowercasing, which BLEU is
    measured against; for training there are none.
    """

    source: Sentences
    target: Sentences
    references: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.source)

    def select(self, rows: Tensor) -> "SentencePairs":
        """The pairs ``rows``, in that order."""
        references = [self.references[i] for i in rows.tolist()] if self.references else ()
        return SentencePairs(self.source.select(rows), self.target.select(rows), references)
