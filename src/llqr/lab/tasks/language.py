"""Predicting the next token of a text: cross-entropy, perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llqr.lab.data import Batches
from llqr.lab.models.language_model import LanguageModel
from llqr.lab.tasks.tokens import TokenTask, token_metrics
from llqr.lab.text.prepared import TokenStream
from llqr.lab.text.windows import WindowBatches

if TYPE_CHECKING:
    from llqr.lab.config.run import Run


@dataclass(frozen=True)
class StreamOptions:
    """Options of running text: windows of ``context`` tokens."""

    context: int = 256

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context must be at least 1, got {self.context}.")


class LanguageTask(TokenTask[TokenStream]):
    """Windows of a text in, its next tokens out; batches are counted in windows.

    Bits per byte do not depend on the vocabulary, so that models with other vocabularies can be compared.
    """

    text_type = TokenStream
    text_options = StreamOptions
    networks = {"gpt": LanguageModel}
    model_options = ("context",)

    metric = "perplexity"
    larger_is_better = False
    unit = "tokens"
    samples_measured = 16  # each has many tokens

    def __init__(self, text: TokenStream, run: Run, device: torch.device) -> None:
        super().__init__(text, run, device)
        self._context = run.data_options.context
        rows = run.training.eval_batch_size
        self._batches = {
            name: WindowBatches(getattr(text, name), rows, self._context, device=device) for name in ("valid", "test")
        }

    def train_batches(self, batch_size: int, seed: int) -> Batches:
        return WindowBatches(self.text.train, batch_size, self._context, seed=seed, device=self.device)

    def measure(self, model: nn.Module, name: str) -> dict[str, float]:
        found = token_metrics(model, self.forward, self._batches[name], self.loss.ignore_index, self.device)
        counts = self.text.counts[name]
        return found | {"bits_per_byte": found["loss"] / math.log(2) * counts["tokens"] / counts["bytes"]}

    def facts(self) -> dict[str, Any]:
        counts = {name: dict(counts) for name, counts in self.text.counts.items()}
        return {"text": {"key": self.text.key, "vocabulary": self.text.subwords.tokens, "counts": counts}}
