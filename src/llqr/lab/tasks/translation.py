"""Translation, on text that `llqr data` prepared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab import models
from llqr.lab.data import Batches
from llqr.lab.errors import DataError
from llqr.lab.models.beam import beam_search
from llqr.lab.models.transformer import TranslationTransformer, differentiable_forward
from llqr.lab.tasks.task import Batch, Task, TaskOptions
from llqr.lab.text import prepared
from llqr.lab.text.batches import SHAPES, decoding_batches, sentence_batches, token_batches
from llqr.lab.text.prepared import ParallelText
from llqr.lab.text.subwords import PAD

if TYPE_CHECKING:
    from llqr.lab.config.run import Run

ASSUMED_VOCABULARY = 10_000
"""Tokens that sizes are worked out with before a text is prepared."""


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


class TokenCrossEntropy(nn.CrossEntropyLoss):
    """The mean label-smoothed cross-entropy over all targets that are not ``ignore_index``.

    `llqr.Geometry` finds ``ignore_index`` here, so that its curvature counts the same tokens.
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits ``(B, T, vocabulary)`` and tokens ``(B, T)``."""
        return super().forward(outputs.flatten(0, 1).float(), targets.flatten())


class TranslationTask(Task):
    """Source sentences in, translations out. The best weights are chosen on the validation split.

    Training batches are counted in tokens and the inner batches of the metric in sentences. BLEU is measured on
    detokenised text against the references as they were written; in lower case where the text was prepared so.
    """

    options = TranslationOptions
    metric = "BLEU"
    larger_is_better = True
    unit = "padded tokens"
    split = "valid"
    samples_measured = 64  # each has many tokens

    def __init__(self, text: ParallelText, run: Run, device: torch.device) -> None:
        self.text, self.device = text, device
        self._loss = TokenCrossEntropy(ignore_index=PAD, label_smoothing=run.task_options.label_smoothing)
        self._search, self._largest = run.task_options, run.training.eval_batch_size
        self._shapes = run.data_options.shapes
        self._bleu, self._batches = {}, {}
        for name, pairs in (("valid", text.valid), ("test", text.test)):
            self._bleu[name] = bleu(pairs.references, text.settings["lowercase"])
            largest = max(self._largest, int(pairs.lengths.max()))
            self._batches[name] = token_batches(pairs, largest, device=device)

    @classmethod
    def data_options(cls, name: str) -> type:
        if not prepared.NAME.fullmatch(name):
            raise ValueError(f"data must be the name of a prepared text, got {name!r}.")
        return PairOptions

    @classmethod
    def build_model(cls, run: Run) -> nn.Module:
        vocabulary = _prepared(run).get("vocabulary", {}).get("size", ASSUMED_VOCABULARY)
        networks = {"transformer": TranslationTransformer}
        return models.construct(networks, run.model.name, {"vocabulary": vocabulary} | run.model.options)

    @classmethod
    def remark(cls, run: Run) -> str:
        if _prepared(run):
            return ""
        return f"{run.data.name} is not prepared yet: sizes are those for {ASSUMED_VOCABULARY:,} tokens"

    @classmethod
    def prepared_key(cls, run: Run) -> str | None:
        key: str | None = _prepared(run).get("key")
        return key

    @classmethod
    def load(cls, run: Run, device: torch.device, seed: int) -> Self:
        try:
            return cls(ParallelText.load(run.data_path), run, device)
        except (OSError, ValueError) as error:
            raise DataError(str(error)) from error

    @property
    def loss(self) -> TokenCrossEntropy:
        return self._loss

    @property
    def data_key(self) -> str:
        return self.text.key

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return token_batches(self.text.train, batch_size, seed=seed, device=self.device, shapes=self._shapes)

    def inner_batches(self, batch_size: int, seed: int) -> Batches:
        return sentence_batches(self.text.train, batch_size, seed=seed, device=self.device)

    def samples_in(self, batch_size: int, like: Batch) -> int:
        longest: int = max(like[0][0].shape[1], like[1].shape[1])
        return max(1, batch_size // longest)

    def differentiable_forward(self, model: nn.Module, inputs: Any) -> Any:
        return differentiable_forward(model, inputs)

    def size(self, batch: Batch) -> int:
        count: int = batch[1].numel()
        return count

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        translations = self.translate(cast(TranslationTransformer, model), getattr(self.text, split).source)
        score = float(self._bleu[split].corpus_score(translations, None).score)
        predictions = ((self.forward(model, inputs), targets) for inputs, targets in self._batches[split])
        return {"BLEU": score} | token_metrics(predictions, self.device)

    @torch.no_grad()
    def translate(self, model: TranslationTransformer, source: Sequence[Tensor]) -> list[str]:
        """The best translation of every sentence, as text."""
        found: list[Sequence[int]] = [()] * len(source)
        options = {name: getattr(self._search, name) for name in ("beam", "length_penalty", "max_length")}
        for places, tokens in decoding_batches(source, self._largest, device=self.device):
            several = beam_search(model, tokens, **options)
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
                "languages": list(text.settings["languages"]),
                "vocabulary": text.subwords.tokens,
                "pairs": {name: len(getattr(text, name)) for name in ("train", "valid", "test")},
            },
        }


def token_metrics(predictions: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, float]:
    """Of logits and tokens: how often the most likely token is wrong, in %, and the perplexity; padding is left out."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for logits, targets in predictions:
        logits, real = logits.float(), targets != PAD
        wrong = (logits.argmax(dim=-1) != targets) & real
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        sums += torch.stack([wrong.sum(), loss, real.sum()])
    wrong, loss, count = sums.tolist()
    perplexity = math.exp(loss / count) if loss / count < 700 else math.inf
    return {"token_error": 100 * wrong / count, "perplexity": perplexity, "loss": loss / count}


def _prepared(run: Run) -> dict[str, Any]:
    """What is known of the text that was prepared for a run; nothing if there is none."""
    try:
        return prepared.read(run.data_path, mmap=True)
    except (OSError, ValueError):
        return {}


def bleu(references: Sequence[str], lowercase: bool) -> Any:
    """sacrebleu's BLEU against one reference each, as it was written; ``lowercase`` ignores case.

    Its signature says which BLEU it is: tokenisation, case, smoothing and the version of sacrebleu.
    """
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(lowercase=lowercase, references=[list(references)])
