"""What tasks over token sequences share: prepared text, the loss per token, how well tokens are predicted."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab import models
from llqr.lab.errors import DataError
from llqr.lab.models.sublayers import differentiable_forward
from llqr.lab.tasks.task import Batch, Task
from llqr.lab.text import prepared
from llqr.lab.text.prepared import ParallelText, PreparedText, TokenStream
from llqr.lab.text.subwords import PAD

if TYPE_CHECKING:
    from llqr.lab.config.run import Run

ASSUMED_VOCABULARY = 10_000
"""Tokens that sizes are worked out with before a text is prepared."""
Text = TypeVar("Text", bound=ParallelText | TokenStream)


class TokenCrossEntropy(nn.CrossEntropyLoss):
    """The mean label-smoothed cross-entropy over all targets that are not ``ignore_index``.

    `llqr.Geometry` finds ``ignore_index`` here, so that its curvature counts the same tokens.
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits ``(B, T, vocabulary)`` and tokens ``(B, T)``."""
        return super().forward(outputs.flatten(0, 1).float(), targets.flatten())


class TokenTask(Task, Generic[Text]):
    """A task on text that `llqr data` prepared: the best weights are chosen on its validation split."""

    split = "valid"
    text_type: ClassVar[type[PreparedText[Any]]]
    text_options: ClassVar[type]
    """The dataclass that reads ``data.options``, whatever the name of the text."""
    networks: ClassVar[dict[str, Callable[..., nn.Module]]]
    model_options: ClassVar[tuple[str, ...]] = ()
    """Which of the data's options the network has, too."""

    def __init__(self, text: Text, run: Run, device: torch.device) -> None:
        self.text = text
        self.device = device
        self._loss = TokenCrossEntropy(ignore_index=PAD, label_smoothing=run.task_options.label_smoothing)

    @classmethod
    def data_options(cls, name: str) -> type:
        if not prepared.NAME.fullmatch(name):
            raise ValueError(f"data must be the name of a prepared text, got {name!r}.")
        return cls.text_options

    @classmethod
    def build_model(cls, run: Run) -> nn.Module:
        sizes = {option: getattr(run.data_options, option) for option in cls.model_options}
        sizes["vocabulary"] = _prepared(run).get("vocabulary", {}).get("size", ASSUMED_VOCABULARY)
        return models.construct(cls.networks, run.model.name, sizes | run.model.options)

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
            text: Any = cls.text_type.load(run.data_path)  # a Text, which a class variable cannot say
            return cls(text, run, device)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise DataError(str(error)) from error

    @property
    def loss(self) -> TokenCrossEntropy:
        return self._loss

    @property
    def data_key(self) -> str:
        return self.text.key

    def differentiable_forward(self, model: nn.Module, inputs: Any) -> Tensor:
        return differentiable_forward(model, inputs)

    def size(self, batch: Batch) -> int:
        count: int = batch[1].numel()
        return count

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.measure(model, "valid")

    def test(self, model: nn.Module) -> dict[str, float]:
        return self.measure(model, "test")

    @abstractmethod
    def measure(self, model: nn.Module, name: str) -> dict[str, float]:
        """The metrics on a split."""


def token_metrics(
    model: nn.Module, forward: Any, batches: Iterable[Batch], ignore_index: int, device: torch.device
) -> dict[str, float]:
    """Given the true tokens before it: how often the most likely token is wrong, in %, and the perplexity."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        logits = forward(model, inputs).float()
        real = targets != ignore_index
        wrong = (logits.argmax(dim=-1) != targets) & real
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum")
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
