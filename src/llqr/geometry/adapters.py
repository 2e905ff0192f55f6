"""Losses that networks of a common kind are trained with, in the form a geometry takes."""

from __future__ import annotations

import torch
from torch import Tensor


class ShiftedCrossEntropy:
    """The mean loss of a causal language model: outputs at one place predict the target of the next.

    Args:
        ignore_index: targets that are left out.

    Example:
        >>> tokens = torch.tensor([[1, 2, 0]])
        >>> logits = torch.full((1, 3, 4), -100.0)
        >>> logits[0, 0, 2] = logits[0, 1, 0] = 100.0
        >>> ShiftedCrossEntropy()(logits, tokens).item()
        0.0
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits[..., :-1, :].flatten(0, -2), targets[..., 1:].flatten(), ignore_index=self.ignore_index
        )

    def terms(self, targets: Tensor) -> Tensor:
        """How many targets the mean is over."""
        return (targets[..., 1:] != self.ignore_index).sum()
