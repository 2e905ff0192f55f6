"""Translating sentences: label-smoothed cross-entropy of tokens, BLEU of what a beam search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from llqr.lab.data import Batches
from llqr.lab.extras import extra
from llqr.lab.models.beam import beam_search
from llqr.lab.models.transformer import TranslationTransformer
from llqr.lab.tasks.task import Batch, TaskOptions
from llqr.lab.tasks.tokens import TokenTask, token_metrics
from llqr.lab.text.pair_batches import SHAPES, decoding_batches, sentence_batches, token_batches
from llqr.lab.text.prepared import ParallelText
from llqr.lab.text.subwords import BOS, EOS, PAD

if TYPE_CHECKING:
    from llqr.lab.config.run import Run


@dataclass(frozen=True)
class PairOptions:
    """Options of parallel text: the most ``shapes`` that batches come in."""

    shapes: int = SHAPES

    def __post_init__(self) -> None:
        if self.shapes < 1:
            raise ValueError(f"shapes must be at least 1, got {self.shapes}.")


@dataclass(frozen=True)
class TranslationOptions(TaskOptions):
    """Options of translation: the beam search whose output BLEU is measured on.

    ``max_length`` is ``(a, b)``: a source of ``S`` tokens is translated into at most ``a S + b``.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_length: tuple[float, float] = (1.2, 10.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam < 1:
            raise ValueError(f"beam must be at least 1, got {self.beam}.")
        if not all(part >= 0 for part in self.max_length):
            raise ValueError(f"max_length must be two numbers, neither negative, got {list(self.max_length)}.")


class TranslationTask(TokenTask[ParallelText]):
    """Source sentences in, translations out.

    Training batches are counted in tokens and the inner batches of the metric in sentences. BLEU is measured on
    detokenised text against the references as they were written; in lower case where the text was prepared so.
    """

    text_type = ParallelText
    options = TranslationOptions
    text_options = PairOptions
    networks = {"transformer": TranslationTransformer}

    metric = "BLEU"
    larger_is_better = True
    unit = "padded tokens"
    samples_measured = 64  # each has many tokens

    def __init__(self, text: ParallelText, run: Run, device: torch.device) -> None:
        super().__init__(text, run, device)
        text.detokenise([])  # if what BLEU needs is missing, fail now and not after hours
        largest = run.training.eval_batch_size
        self._search, self._largest = run.task_options, largest
        self._shapes = run.data_options.shapes
        lowercase = text.settings["lowercase"]
        self._bleu = {name: bleu(getattr(text, name).references, lowercase) for name in ("valid", "test")}
        self._batches = {}
        for name, pairs in (("valid", text.valid), ("test", text.test)):
            longest = int(pairs.lengths.max())
            self._batches[name] = token_batches(pairs, max(largest, longest), device=device)

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return token_batches(self.text.train, batch_size, seed=seed, device=self.device, shapes=self._shapes)

    def inner_batches(self, batch_size: int, seed: int) -> Batches:
        return sentence_batches(self.text.train, batch_size, seed=seed, device=self.device)

    def samples_in(self, batch_size: int, like: Batch) -> int:
        longest: int = max(like[0][0].shape[1], like[1].shape[1])
        return max(1, batch_size // longest)

    def forward(self, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Any:
        return model(*inputs)

    def measure(self, model: nn.Module, name: str) -> dict[str, float]:
        tokens = token_metrics(model, self.forward, self._batches[name], self.loss.ignore_index, self.device)
        translations = self.translate(cast(TranslationTransformer, model), getattr(self.text, name).source)
        return {"BLEU": float(self._bleu[name].corpus_score(translations, None).score)} | tokens

    @torch.no_grad()
    def translate(self, model: TranslationTransformer, source: Sequence[Tensor]) -> list[str]:
        """The best translation of every sentence, as text."""
        found: list[Sequence[int]] = [()] * len(source)
        for places, tokens in decoding_batches(source, self._largest, device=self.device):
            several = beam_search(
                model,
                tokens,
                bos=BOS,
                eos=EOS,
                pad=PAD,
                beam=self._search.beam,
                length_penalty=self._search.length_penalty,
                max_length=self._search.max_length,
            )
            for place, hypotheses in zip(places, several, strict=True):
                if hypotheses:
                    found[place] = hypotheses[0].tokens
        return [self.text.detokenise(tokens) for tokens in found]

    def facts(self) -> dict[str, Any]:
        text = self.text
        return {
            "bleu": str(self._bleu["valid"].get_signature()),
            "text": {
                "key": text.key,
                "languages": list(text.languages),
                "vocabulary": text.subwords.tokens,
                "pairs": {name: len(getattr(text, name)) for name in ("train", "valid", "test")},
            },
        }


def bleu(references: Sequence[str], lowercase: bool) -> Any:
    """sacrebleu's BLEU against one reference each, as it was written; ``lowercase`` ignores case.

    Its signature says which BLEU it is: tokenisation, case, smoothing and the version of sacrebleu.
    """
    sacrebleu = extra("sacrebleu", "BLEU comes from sacrebleu")
    return sacrebleu.metrics.BLEU(lowercase=lowercase, references=[list(references)])
