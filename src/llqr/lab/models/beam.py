"""Beam search as fairseq does it, for a whole batch on its device.

A step extends every hypothesis by one token and keeps the ``2 beam`` best extensions of each sentence. Those among the
``beam`` best that end are collected, and the ``beam`` best that do not end continue. A sentence is finished when it has
``beam`` collected hypotheses or reaches its maximum length, where every hypothesis is forced to end. The collected
hypotheses are ordered by log-probability divided by ``length ** length_penalty``, with the end token counted.

One thing differs from fairseq: the maximum length depends on each sentence's own length and not on that of the longest
in the batch, so that a translation does not depend on what it was batched with.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llqr.lab.models.transformer import TranslationTransformer

CHECK_EVERY = 8
"""Steps between checks whether all sentences are finished: each check waits for the device."""


class Hypothesis(NamedTuple):
    """Tokens without begin and end tokens, and the score that hypotheses are ordered by."""

    tokens: list[int]
    score: float


@torch.no_grad()
def beam_search(
    model: TranslationTransformer,
    source: Tensor,
    *,
    bos: int,
    eos: int,
    pad: int,
    beam: int = 5,
    length_penalty: float = 1.0,
    max_length: tuple[float, float] = (1.2, 10),
    min_length: int = 1,
) -> list[list[Hypothesis]]:
    """The ``beam`` best hypotheses of every row of ``source`` (B, S), best first.

    A row of padding only has none, and neither has a row whose logits are not finite.

    Args:
        model: in eval mode.
        bos, eos, pad: the begin, end and padding tokens.
        length_penalty: above 1 favours long hypotheses, 0 compares log-probabilities directly.
        max_length: ``(a, b)``: at most ``a S + b`` tokens before the end token, for a source of ``S`` tokens including
            its end token.
        min_length: minimum number of tokens before the end token.
    """
    a, b = max_length
    if model.training:
        raise ValueError("model must be in eval mode for a search, without dropout.")
    lengths = (source != pad).sum(dim=1)
    limits = (a * lengths.double() + b).long().clamp_max(model.max_length - 1)
    # The width of the batch bounds all limits and is known without waiting for the device.
    longest = min(int(a * source.shape[1] + b), model.max_length - 1)
    dtype = torch.promote_types(next(iter(model.parameters())).dtype, torch.float32)
    search = _Search(lengths == 0, limits, longest, beam, eos, pad, dtype)
    memory, cache = model.encode(source), model.new_cache(longest + 1)
    tokens = source.new_full((len(source), beam), bos)
    for step in range(longest + 1):
        logits = model.decode(tokens, memory, cache)
        logp = logits.log_softmax(dim=2, dtype=dtype).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        tokens, rows = search.extend(logp, step, min_length, length_penalty)
        cache.reorder(rows)
        if step % CHECK_EVERY == CHECK_EVERY - 1 and bool(search.finished.all()):
            break
    return search.hypotheses()


class _Search:
    """The state of a search: hypotheses that continue, and hypotheses that were collected."""

    def __init__(
        self, finished: Tensor, limits: Tensor, longest: int, beam: int, eos: int, pad: int, dtype: torch.dtype
    ) -> None:
        sentences, device = len(finished), finished.device
        self.finished = finished
        self._limits, self._beam, self._eos, self._pad = limits, beam, eos, pad
        # All hypotheses are identical at first, so only one of them may be extended.
        self._scores = torch.full((sentences, beam), -torch.inf, dtype=dtype, device=device)
        self._scores[:, 0] = 0.0
        self._prefixes = torch.full((sentences, beam, longest + 1), pad, device=device)
        self._first_rows = torch.arange(0, sentences * beam, beam, device=device).unsqueeze(1)
        # One extra slot, which is never read, receives what is not kept, so that no write is conditional.
        self._collected = torch.full((sentences, beam + 1, longest + 1), pad, device=device)
        self._collected_scores = torch.full((sentences, beam + 1), -torch.inf, dtype=dtype, device=device)
        self._collected_lengths = torch.zeros((sentences, beam + 1), dtype=torch.int64, device=device)
        self._count = torch.zeros(sentences, dtype=torch.int64, device=device)

    def extend(self, logp: Tensor, step: int, min_length: int, length_penalty: float) -> tuple[Tensor, Tensor]:
        """The last tokens of the hypotheses that continue, and the rows of those they extend."""
        vocabulary = logp.shape[2]
        last = step >= self._limits
        self._restrict(logp, last, too_short=step < min_length)
        scores, at = (self._scores.unsqueeze(2) + logp).flatten(1).topk(min(2, vocabulary) * self._beam)
        parents, tokens = at // vocabulary, at % vocabulary
        ending = (tokens == self._eos) & scores.isfinite()
        self._collect(ending, parents, scores / (step + 1) ** length_penalty, step)
        self.finished = self.finished | (self._count == self._beam) | last

        # The first `beam` candidates that do not end: those that end are moved behind all others.
        places = torch.arange(ending.shape[1], device=ending.device)
        continuing = (places + ending * ending.shape[1]).topk(self._beam, largest=False).indices
        self._scores, tokens, parents = (part.gather(1, continuing) for part in (scores, tokens, parents))
        self._prefixes = self._prefixes_of(parents)
        self._prefixes[:, :, step] = tokens
        return tokens, (self._first_rows + parents).flatten()

    def hypotheses(self) -> list[list[Hypothesis]]:
        """The collected hypotheses, best first."""
        parts = self._collected_scores, self._collected_lengths, self._count, self._collected
        scores, lengths, counts, tokens = (part.tolist() for part in parts)
        found = [
            [Hypothesis(tokens[i][j][: lengths[i][j]], scores[i][j]) for j in range(count)]
            for i, count in enumerate(counts)
        ]
        return [sorted(of_sentence, key=lambda hypothesis: -hypothesis.score) for of_sentence in found]

    def _restrict(self, logp: Tensor, last: Tensor, too_short: bool) -> None:
        """Exclude padding everywhere, the end token too early, and all but the end token at the maximum length."""
        logp[:, :, self._pad] = -torch.inf
        end = logp[:, :, self._eos].clone()
        logp.masked_fill_(last[:, None, None], -torch.inf)
        logp[:, :, self._eos] = end.masked_fill(~last.unsqueeze(1), -torch.inf) if too_short else end

    def _collect(self, ending: Tensor, parents: Tensor, scores: Tensor, step: int) -> None:
        new = ending[:, : self._beam] & ~self.finished.unsqueeze(1)
        places = self._count.unsqueeze(1) + new.cumsum(1) - 1
        places = places.masked_fill(~new, self._beam).clamp_max(self._beam)
        prefixes = self._prefixes_of(parents[:, : self._beam])
        self._collected.scatter_(1, places.unsqueeze(2).expand_as(prefixes), prefixes)
        self._collected_scores.scatter_(1, places, scores[:, : self._beam])
        self._collected_lengths.scatter_(1, places, step)
        self._count = (self._count + new.sum(1)).clamp_max(self._beam)

    def _prefixes_of(self, parents: Tensor) -> Tensor:
        return self._prefixes.gather(1, parents.unsqueeze(2).expand_as(self._prefixes))
