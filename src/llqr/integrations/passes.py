"""The second pass of a step whose first pass a framework has run, micro-batch by micro-batch."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llqr.passes import RandomState
from llqr.sam import Optimizer

T = TypeVar("T")


class Passes:
    """Remembers what ran at the centre since the last step, and runs it again at the probe.

    The loop then clips and calls `step` in its own way, with its own `GradScaler` if it has one. Works for any loop
    without closures, with any number of micro-batches; does nothing for an optimizer that is not llqr's.

    Args:
        optimizer: llqr's, or a framework's wrapper around one.
        ranks: how many processes train one model; if several, they learn one metric together, even if the geometry
            got the model without a DDP wrapper.
        shares: whether each pass returns its share of the step's loss, as Hugging Face's do, and not its own loss; for
            `opt.last`.

    Example:
        >>> import llqr
        >>> model = torch.nn.Linear(4, 3)
        >>> opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, model=model)
        >>> passes = Passes(opt)
        >>> def forward_backward(x):
        ...     model(x).square().mean().backward()
        >>> for x in torch.randn(2, 8, 4):
        ...     passes.run(forward_backward, x)
        >>> passes.repeat_at_probe()
        True
        >>> opt.step()
        >>> opt.steps
        1
    """

    def __init__(self, optimizer: Any, ranks: int = 1, *, shares: bool = False) -> None:
        self._optimizer = inner_optimizer(optimizer)
        learn_together(self._optimizer, ranks)
        if self._optimizer is not None:
            # `step` finds the gradients of the second pass, and a GradScaler treats it like that of any optimizer.
            self._optimizer._step_supports_amp_scaling = False
        self._recorded: list[tuple[RandomState, Callable[..., object], tuple[Any, ...]]] = []
        self._losses: list[torch.Tensor] = []
        self._steps, self._shares = 0, shares
        self.repeating = False

    def _record(self, forward_backward: Callable[..., object], *args: Any) -> None:
        """Before the forward pass: afterwards the random numbers of the second pass would be others."""
        if self._optimizer is None or self.repeating:
            return
        self.end()
        if self._steps != self._optimizer.steps:  # a step that needed no repeat_at_probe
            self.forget()
            self._steps = self._optimizer.steps
        if not self._optimizer.probing:
            return
        self._recorded.append((RandomState(self._optimizer._order()), forward_backward, args))

    def run(self, forward_backward: Callable[..., T], *args: Any) -> T:
        """Run a forward and backward pass at the centre, to be repeated at the probe; returns what it returns.

        Pass everything that belongs to one micro-batch as an argument: the function runs again after the loop's
        variables have moved on. A pass that fails is not repeated.
        """
        self._record(forward_backward, *args)
        try:
            self.measure(returned := forward_backward(*args))
        except BaseException:
            del self._recorded[-1:]
            raise
        return returned

    def measure(self, returned: Any, losses: list[torch.Tensor] | None = None) -> None:
        """Keep the loss that a pass has returned, a tensor or `"loss"` of a mapping, for `Optimizer.last`."""
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if self._optimizer is not None and self._optimizer.measure and isinstance(loss, torch.Tensor):
            (self._losses if losses is None else losses).append(loss.detach().mean())

    def forget(self) -> None:
        """Repeat none of the passes since the last step, whose gradients the loop has dropped."""
        self._recorded, self._losses = [], []

    def repeat_at_probe(
        self,
        *,
        batch: Any = None,
        grad_scaler: Any = None,
        unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> bool:
        """Refresh if due, and replace the gradients by those of all recorded passes at the probe.

        The weights are at the centre again when it returns. Returns whether the optimizer has a step to do; it has none
        without gradients.

        Args:
            batch: what a refresh learns from, unless the geometry draws its own batches.
            grad_scaler: the framework's; its loss scale is in the present gradients.
            unsynced: entered for every pass but the last, which alone needs to reduce gradients over the ranks.
        """
        recorded, losses = self._recorded, self._losses
        self.forget()
        optimizer = self._optimizer
        if optimizer is None or all(parameter.grad is None for parameter in optimizer._order()):
            return False
        self.end()
        probing, geometry = optimizer.probing, optimizer.geometry
        if probing and not recorded:
            raise RuntimeError("repeat_at_probe: there is no pass to repeat; let run() run each pass at the centre")
        draws = getattr(geometry, "batches", None) is not None
        # Without a second pass the step takes the present gradients as they are.
        scaler = grad_scaler if probing else None
        optimizer.first_step(batch=None if draws else batch, grad_scaler=scaler, zero_grad=probing)
        step = optimizer._run.begun
        assert step is not None
        now = RandomState(step.parameters)
        at_probe: list[torch.Tensor] = []
        self.repeating = True
        try:
            for i, (random, forward_backward, args) in enumerate(recorded if probing else (), start=1):
                if optimizer._same_dropout:
                    random.restore()
                with nullcontext() if i == len(recorded) else unsynced():
                    self.measure(forward_backward(*args), at_probe)
            for name, found in (("loss", losses), ("loss_at_probe", at_probe)):
                if found:
                    together = torch.stack(found)
                    step.note(**{name: together.sum() if self._shares else together.mean()})
            step.back()
            step.scaler = None  # the loop unscales these gradients, or its scaler does before it calls `step`
        except BaseException:
            optimizer.restore()
            raise
        finally:
            self.repeating = False
            if optimizer._same_dropout:
                now.restore()
        return True

    @property
    def has_gradients_of_a_probe(self) -> bool:
        """Whether no step has used the gradients of the last second pass, and they are still there."""
        optimizer = self._optimizer
        return optimizer is not None and optimizer._begun and any(p.grad is not None for p in optimizer._order())

    def end(self) -> None:
        """Abandon a step that the framework has decided against."""
        if self._optimizer is not None and self._optimizer._begun:
            self._optimizer.restore()


def learn_together(optimizer: Optimizer | None, ranks: int) -> None:
    """Let the processes that train one model learn one metric: the geometry knows the bare model only."""
    linearizer = getattr(None if optimizer is None else optimizer.geometry, "linearizer", None)
    if ranks > 1 and linearizer is not None:
        linearizer.learn_with(dist.group.WORLD)


def inner_optimizer(optimizer: Any) -> Optimizer | None:
    """The `llqr.Optimizer` inside a framework's wrapper; None if there is none."""
    # Fabric's wrapper inherits from the class of what it wraps, so that `isinstance` alone would stop too early. What
    # the base wraps in its turn (Lookahead) is found through llqr's own `__getattr__`, and not to be followed.
    while not isinstance(optimizer, Optimizer) or hasattr(type(optimizer), "optimizer"):
        if (optimizer := getattr(optimizer, "optimizer", None)) is None:
            return None
    return optimizer
