"""What tasks over token sequences share: the loss of a token, how well tokens are predicted, and two splits."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.config.recipe import Recipe
from llqr.lab.errors import DataError
from llqr.lab.models.sublayers import differentiable_forward
from llqr.lab.tasks.task import Batch, Task
from llqr.lab.text.parallel_text import ParallelText
from llqr.lab.text.token_stream import TokenStream


class TokenCrossEntropy:
    """The mean label-smoothed cross-entropy over all targets that are not ``ignore_index``.

    `llqr.Geometry` finds ``ignore_index`` here, so that its curvature counts the same tokens.
    """

    def __init__(self, ignore_index: int, label_smoothing: float = 0.0) -> None:
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits ``(B, T, vocabulary)`` and tokens ``(B, T)``."""
        return F.cross_entropy(
            outputs.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


class TokenTask(Task):
    """A task on prepared text: chosen on its validation split, measured at the end on its test split."""

    split = "valid"

    def __init__(self, text: Any, recipe: Recipe, device: torch.device) -> None:
        self.text: ParallelText | TokenStream = text
        self.device = device
        self._loss = TokenCrossEntropy(text.vocabulary.pad, recipe.task_options.label_smoothing)

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device) -> Self:
        try:
            return cls(cls.read(Path(recipe.data.root) / recipe.data.name), recipe, device)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise DataError(str(error)) from error

    @classmethod
    @abstractmethod
    def read(cls, root: Path) -> ParallelText | TokenStream:
        """The text that was prepared at ``root``."""

    @property
    def loss(self) -> TokenCrossEntropy:
        return self._loss

    @property
    def data_key(self) -> str:
        return self.text.key

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def differentiable_forward(self, model: nn.Module, inputs: Any) -> Tensor:
        return differentiable_forward(model, inputs)

    def size(self, batch: Batch) -> int:
        return batch[1].numel()

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
    """With the true tokens before it given, how often a token is not the likeliest one, in %, and its perplexity."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        logits = forward(model, inputs).float()
        real = targets != ignore_index
        wrong = (logits.argmax(dim=-1) != targets) & real
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum")
        sums += torch.stack([wrong.sum(), loss, real.sum()])
    wrong, loss, count = sums.tolist()
    return {"token_error": 100 * wrong / count, "perplexity": perplexity(loss / count), "loss": loss / count}


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
