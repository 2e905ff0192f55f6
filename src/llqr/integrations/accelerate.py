"""Accelerate: the two passes of a loop that calls `accelerator.backward` and `optimizer.step()`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from llqr.integrations.passes import Passes


class TwoPasses:
    """Takes the place of `accelerator.backward`; the rest of the loop stays as it is.

    Inside `accelerator.accumulate` it remembers the micro-batches, and after the last one it runs them all again at the
    probe. `optimizer.step()` then ends the step, with the loss scale of `mixed_precision="fp16"` and after clipping.

    Args:
        accelerator: whose `backward` it calls.
        optimizer: what `accelerator.prepare` returned for an optimizer of llqr.
        model: what `accelerator.prepare` returned for the model; spares several processes a reduction for each
            micro-batch of the second pass.

    Example:
        >>> import llqr
        >>> accelerator, net = Accelerator(cpu=True), nn.Linear(4, 3)
        >>> net, opt = accelerator.prepare(net, llqr.SAM(torch.optim.SGD(net.parameters(), lr=0.1), rho=0.05))
        >>> passes = TwoPasses(accelerator, opt)
        >>> with accelerator.accumulate(net):
        ...     loss = passes.backward(lambda x: net(x).square().mean(), torch.ones(2, 4))
        ...     opt.step()
        ...     opt.zero_grad()
    """

    def __init__(
        self, accelerator: Accelerator, optimizer: torch.optim.Optimizer, model: nn.Module | None = None
    ) -> None:
        self._accelerator = accelerator
        self._passes = Passes(optimizer, accelerator.num_processes)
        self._model = model

    def backward(
        self, compute_loss: Callable[..., Tensor], *args: Any, batch: Any = None, last: bool | None = None
    ) -> Tensor:
        """`accelerator.backward(compute_loss(*args))`; after the last micro-batch all of them again, at the probe.

        Args:
            compute_loss: the loss of a micro-batch; Accelerate divides it by their number.
            args: the micro-batch, in whatever form `compute_loss` takes it.
            batch: what a refresh learns from when one is due.
            last: whether this is the last micro-batch before `optimizer.step()`, in a loop that accumulates by hand;
                by default `accelerator.accumulate` knows.

        Returns:
            The loss at the centre.
        """
        if self._passes.has_gradients_of_a_probe and not self._accelerator.optimizer_step_was_skipped:
            raise RuntimeError(
                "backward: optimizer.step() did not follow the last micro-batch; to accumulate by hand, pass "
                "last=False for every micro-batch of a step but the last, or use accelerator.accumulate"
            )
        loss = self._passes.run(self._forward_backward, compute_loss, *args)
        if self._accelerator.sync_gradients if last is None else last:
            self._passes.repeat_at_probe(
                batch=batch,
                grad_scaler=self._accelerator.scaler,
                unsynced=partial(self._accelerator.no_sync, self._model),
            )
        return loss

    def forget(self) -> None:
        """Repeat none of the micro-batches so far, whose gradients the loop has dropped."""
        self._passes.forget()

    def _forward_backward(self, compute_loss: Callable[..., Tensor], *args: Any) -> Tensor:
        loss = compute_loss(*args)
        self._accelerator.backward(loss)
        return loss.detach()
