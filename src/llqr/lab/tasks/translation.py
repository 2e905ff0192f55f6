"""Translating sentences: label-smoothed cross-entropy of tokens, BLEU of what a beam search finds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llqr.lab.config.domains import Translation
from llqr.lab.config.recipe import Recipe
from llqr.lab.data import Batches
from llqr.lab.models.decoding import beam_search
from llqr.lab.tasks.bleu import Bleu
from llqr.lab.tasks.task import Batch
from llqr.lab.tasks.tokens import TokenTask, token_metrics
from llqr.lab.text import parallel_text
from llqr.lab.text.pair_batches import DecodingBatches, SentenceBatches, TokenBatches
from llqr.lab.text.parallel_text import ParallelText
from llqr.lab.text.sentences import SentencePairs, Sentences


class TranslationTask(TokenTask):
    """Source sentences in, translations out.

    Training batches are counted in tokens and the inner batches of the metric in sentences. BLEU is measured on
    detokenised text against the references as they were written; in small letters where the text was prepared so.
    """

    metric = "BLEU"
    larger_is_better = True
    unit = "padded tokens"
    samples_measured = 64  # each of them many tokens

    def __init__(self, text: ParallelText, recipe: Recipe, device: torch.device) -> None:
        super().__init__(text, recipe, device)
        self._translator = Translator(text, recipe.task_options, recipe.training.eval_batch_size, device)
        self._shapes = recipe.data_options.shapes
        lowercase = text.settings["lowercase"]
        self._bleu = {name: Bleu(getattr(text, name).references, lowercase) for name in ("valid", "test")}
        largest = recipe.training.eval_batch_size
        self._batches = {name: _in_order(getattr(text, name), largest, device) for name in ("valid", "test")}

    @classmethod
    def read(cls, root: Path) -> ParallelText:
        text = parallel_text.load(root)
        text.detokenise([])  # what BLEU needs should be missed now and not after hours
        return text

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return TokenBatches(self.text.train, batch_size, seed=seed, device=self.device, shapes=self._shapes)

    def inner_batches(self, batch_size: int, seed: int) -> Batches:
        return SentenceBatches(self.text.train, batch_size, seed=seed, device=self.device)

    def samples_in(self, batch_size: int, like: Batch) -> int:
        return max(1, batch_size // max(like[0][0].shape[1], like[1].shape[1]))

    def forward(self, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return model(*inputs)

    def measure(self, model: nn.Module, name: str) -> dict[str, float]:
        tokens = token_metrics(model, self.forward, self._batches[name], self.loss.ignore_index, self.device)
        translations = self._translator.translate(model, getattr(self.text, name).source)
        return {"BLEU": self._bleu[name].score(translations)} | tokens

    def facts(self) -> dict[str, Any]:
        text = self.text
        return {
            "bleu": self._bleu["valid"].signature,
            "text": {
                "key": text.key,
                "languages": list(text.languages),
                "vocabulary": text.vocabulary.tokens,
                "pairs": {name: len(getattr(text, name)) for name in ("train", "valid", "test")},
            },
        }


class Translator:
    """Sentences into the target language by beam search.

    Args:
        text: the prepared text whose vocabulary a model knows.
        options: of the search.
        max_tokens: the most source tokens, padding included, that are translated at once.
        device: where the model is.
    """

    def __init__(self, text: ParallelText, options: Translation, max_tokens: int, device: torch.device) -> None:
        self._text, self._options, self._max_tokens, self._device = text, options, max_tokens, device

    @torch.no_grad()
    def translate(self, model: nn.Module, source: Sentences) -> list[str]:
        """The best translation of every sentence, as text; nothing for a sentence without tokens."""
        vocabulary, options = self._text.vocabulary, self._options
        found: list[Sequence[int]] = [()] * len(source)
        for places, tokens in DecodingBatches(source, self._max_tokens, device=self._device):
            several = beam_search(
                model,
                tokens,
                bos=vocabulary.bos,
                eos=vocabulary.eos,
                pad=vocabulary.pad,
                beam=options.beam,
                length_penalty=options.length_penalty,
                max_length=options.max_length,
            )
            for place, hypotheses in zip(places, several, strict=True):
                if hypotheses and len(source[place]):
                    found[place] = hypotheses[0].tokens
        return [self._text.detokenise(tokens) for tokens in found]


def _in_order(pairs: SentencePairs, largest: int, device: torch.device) -> TokenBatches:
    """The pairs in batches of about as many tokens as the decoder takes, and never fewer than the longest needs."""
    longest = int(torch.cat([pairs.source.lengths, pairs.target.lengths]).max()) + 1
    return TokenBatches(pairs, max(largest, longest), device=device)
