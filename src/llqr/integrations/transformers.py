"""Hugging Face: a Trainer that runs a step's second pass, and what a geometry needs to learn from its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import Trainer

from llqr.integrations.accelerate import forward_as_written
from llqr.integrations.passes import Passes

Inputs = Mapping[str, Any]


class TwoPassTrainer(Trainer):
    """A `transformers.Trainer` for the optimizers of llqr, given as `optimizers=(optimizer, None)`.

    Accumulation, fp16 and bf16, clipping, schedules, checkpoints and resuming are the Trainer's own. The losses it logs
    are those at the centre, and dropout draws the same masks in both passes. A Trainer of your own becomes
    `class MyTrainer(TwoPassTrainer)`, or `class Both(TwoPassTrainer, TheirTrainer)` for one that you cannot change.

    Args:
        geometry_batch: makes what a refresh learns from of the Trainer's inputs, such as `causal_lm_batch`; by default
            they are taken as they are, with `"labels"` as the targets.

    Example:
        >>> trainer = TwoPassTrainer(model, arguments, optimizers=(llqr.SAM(base), None))  # doctest: +SKIP
    """

    def __init__(self, *args: Any, geometry_batch: Callable[[Inputs], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._geometry_batch = geometry_batch
        self._passes: tuple[Any, Passes] | None = None

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        step = super().training_step
        passes = self._current_passes()
        # Copies, because computing the loss may take the labels out.
        passes.record(lambda: step(model, dict(inputs), num_items_in_batch))
        loss = step(model, dict(inputs), num_items_in_batch)
        if self.accelerator.sync_gradients:
            passes.repeat_at_probe(
                batch=lambda: self._learned_from(inputs),
                grad_scaler=self.accelerator.scaler,
                unsynced=partial(self.accelerator.no_sync, model),
                refreshing=forward_as_written,
            )
        return loss

    def _current_passes(self) -> Passes:
        """Those of the present optimizer, which the Trainer replaces whenever training begins."""
        if self._passes is None or self._passes[0] is not self.optimizer:
            self._passes = self.optimizer, Passes(self.optimizer)
        return self._passes[1]

    def _learned_from(self, inputs: Inputs) -> Any:
        prepared = self._prepare_inputs(dict(inputs))
        return prepared if self._geometry_batch is None else self._geometry_batch(prepared)


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a classifier, or of a language model's tokens; those labelled -100 do not count.

    Example:
        >>> import torch
        >>> round(float(token_cross_entropy(torch.zeros(2, 5, 4), torch.tensor([[1, 2, 3, -100, -100]] * 2))), 4)
        1.3863
    """
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def causal_lm_batch(inputs: Inputs) -> tuple[dict[str, Any], Tensor]:
    """The inputs of a causal language model, and for each position the label of the next one, which it predicts.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> causal_lm_batch({"input_ids": tokens, "labels": tokens})[1].tolist()
        [[6, 7, -100]]
    """
    others = {name: value for name, value in inputs.items() if name != "labels"}
    return others, pad(inputs["labels"], (0, 1), value=-100)[..., 1:]
