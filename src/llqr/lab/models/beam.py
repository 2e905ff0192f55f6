"""Beam search as fairseq does it, for a whole batch on its device.

A step extends every hypothesis by one token and keeps the ``2 beam`` best extensions of each sentence. Those among the
``beam`` best that end are collected, and the ``beam`` best that do not end continue. A sentence is finished when it has
``beam`` collected hypotheses or reaches its maximum length, where every hypothesis is forced to end. The collected
hypotheses are ordered by log-probability divided by ``length ** length_penalty``, with the end token counted.

One thing differs from fairseq: the maximum length depends on each sentence's own length and not on that of the longest
in the batch, so that a translation does not depend on what it was batched with.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llqr.lab.models.transformer import TranslationTransformer
from llqr.lab.text.subwords import BOS, EOS, PAD

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
    beam: int = 5,
    length_penalty: float = 1.0,
    max_length: tuple[float, float] = (1.2, 10),
) -> list[list[Hypothesis]]:
    """The ``beam`` best hypotheses of every row of ``source`` (B, S), best first.

    A row of padding only has none, and neither has a row whose logits are not finite.

    Args:
        model: in eval mode.
        length_penalty: above 1 favours long hypotheses, 0 compares log-probabilities directly.
        max_length: ``(a, b)``: at most ``a S + b`` tokens before the end token, for a source of ``S`` tokens including
            its end token.
    """
    if model.training:
        raise ValueError("model must be in eval mode for a search, without dropout.")
    a, b = max_length
    lengths = (source != PAD).sum(dim=1)
    limits = (a * lengths.double() + b).long().clamp_max(model.max_length - 1)
    # The width of the batch bounds all limits and is known without waiting for the device.
    longest = min(int(a * source.shape[1] + b), model.max_length - 1)
    dtype = torch.promote_types(next(iter(model.parameters())).dtype, torch.float32)
    memory = model.encode(source)
    cache: list[list[Tensor]] = [[] for _ in memory.keys_and_values]
    first_rows = torch.arange(0, len(source) * beam, beam, device=source.device).unsqueeze(1)
    tokens = source.new_full((len(source), beam), BOS)
    # All hypotheses are identical at first, so only one of them may be extended.
    scores = torch.full(tokens.shape, -torch.inf, dtype=dtype, device=source.device)
    scores[:, 0] = 0.0
    finished, collected = lengths == 0, torch.zeros_like(lengths)
    steps: list[tuple[Tensor, ...]] = []
    for step in range(longest + 1):
        logp = model.decode(tokens, memory, cache).log_softmax(dim=2, dtype=dtype)
        logp = logp.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        # Exclude padding everywhere, all but the end token at the maximum length, and the end token at first.
        last = step >= limits
        logp[:, :, PAD] = -torch.inf
        end = logp[:, :, EOS].clone()
        logp.masked_fill_(last[:, None, None], -torch.inf)
        logp[:, :, EOS] = end.masked_fill(~last.unsqueeze(1), -torch.inf) if step == 0 else end

        vocabulary = logp.shape[2]
        best, at = (scores.unsqueeze(2) + logp).flatten(1).topk(min(2, vocabulary) * beam)
        parents, tokens = at // vocabulary, at % vocabulary
        ends = (tokens == EOS) & best.isfinite()
        ending = ends[:, :beam] & ~finished.unsqueeze(1)
        # The first `beam` candidates that do not end: those that end are moved behind all others.
        order = torch.arange(ends.shape[1], device=ends.device) + ends * ends.shape[1]
        going_on = order.topk(beam, largest=False).indices
        ended, penalised = parents[:, :beam], best[:, :beam] / (step + 1) ** length_penalty
        scores, tokens, parents = (part.gather(1, going_on) for part in (best, tokens, parents))
        steps.append((ending, penalised, ended, tokens, parents))
        collected = collected + ending.sum(dim=1)
        finished = finished | (collected >= beam) | last
        if step % CHECK_EVERY == CHECK_EVERY - 1 and bool(finished.all()):
            break
        rows = (first_rows + parents).flatten()
        cache = [[part[rows] for part in known] for known in cache]
    return _hypotheses(steps, beam)


def _hypotheses(steps: list[tuple[Tensor, ...]], beam: int) -> list[list[Hypothesis]]:
    """The first ``beam`` hypotheses that ended in each sentence, best first, read backwards from where they ended."""
    ending, scores, ended, tokens, parents = (torch.stack(parts).tolist() for parts in zip(*steps, strict=True))
    found: list[list[Hypothesis]] = [[] for _ in ending[0]]
    for end, sentence, candidate in np.argwhere(np.array(ending)).tolist():
        if len(found[sentence]) < beam:
            words, place = [], ended[end][sentence][candidate]
            for step in reversed(range(end)):
                words.append(tokens[step][sentence][place])
                place = parents[step][sentence][place]
            found[sentence].append(Hypothesis(words[::-1], scores[end][sentence][candidate]))
    return [sorted(hypotheses, key=lambda hypothesis: -hypothesis.score) for hypotheses in found]
