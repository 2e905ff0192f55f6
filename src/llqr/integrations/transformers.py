"""Hugging Face: a Trainer that runs a step's second pass."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from llqr.integrations.passes import Passes

Inputs = Mapping[str, Any]


class TwoPassTrainer(Trainer):
    """A `transformers.Trainer` for the optimizers of llqr, given as `optimizers=(optimizer, None)`.

    Accumulation, fp16 and bf16, clipping, schedules, checkpoints and resuming are the Trainer's own. The losses it logs
    are those at the centre, and dropout draws the same masks in both passes. A Trainer of your own becomes
    `class MyTrainer(TwoPassTrainer)`, or `class Both(TwoPassTrainer, TheirTrainer)` for one that you cannot change.

    A refresh learns from the last micro-batch, with its `"labels"` as the targets: the geometry's loss is
    `torch.nn.functional.cross_entropy` for a classifier, `llqr.ShiftedCrossEntropy()` for a causal language model.

    Example:
        >>> trainer = TwoPassTrainer(model, arguments, optimizers=(llqr.SAM(base, rho=0.005), None))  # doctest: +SKIP
    """

    _passes: Passes | None = None

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Called whenever training begins; the passes of one that was interrupted are not repeated."""
        self._passes = None
        return super().create_scheduler(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        step = super().training_step
        if self._passes is None:
            self._passes = Passes(self.optimizer, self.accelerator.num_processes, shares=True)
        passes = self._passes
        # Copies, because computing the loss may take the labels out.
        loss = passes.run(lambda: step(model, dict(inputs), num_items_in_batch))
        if self.accelerator.sync_gradients:
            passes.repeat_at_probe(
                batch=lambda: self._prepare_inputs(dict(inputs)),
                grad_scaler=self.accelerator.scaler,
                unsynced=partial(self.accelerator.no_sync, model),
            )
        return loss
