"""The second pass of a step whose first pass a framework has run, micro-batch by micro-batch."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llqr.geometry import Geometry
from llqr.optimizer import Optimizer
from llqr.random_state import RandomState, repeated
from llqr.step import gradients

T = TypeVar("T")


class _Pass:
    """One forward and backward pass that has run at the centre."""

    def __init__(self, random: RandomState, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.random = random
        self._function, self._args = function, args
        self._found = [(one, _tensors_around(one)) for one in (function, *args) if callable(one)]

    def repeat(self) -> None:
        for function, found in self._found:
            now = _surroundings(function)
            for name in (name for name, value in found.items() if now.get(name) is not value):
                raise RuntimeError(
                    f"{name}: another tensor than when this pass ran first, as in a loop over micro-batches; make it "
                    f"an argument, or bind it (lambda {name}={name}: ...)"
                )
        self._function(*self._args)


class Passes:
    """Remembers what ran at the centre since the last step, and runs it again at the probe.

    The loop then clips and calls `step` in its own way, which ends the step. It works for any loop without closures,
    with as many micro-batches as it likes; an optimizer that is not of llqr is left alone.

    Args:
        optimizer: of llqr, or a framework's wrapper around one.
        ranks: how many processes train one model; if several, they learn one metric together, although the geometry
            was given the model without a DDP wrapper.

    Example:
        >>> import llqr
        >>> model = nn.Linear(4, 3)
        >>> opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> passes = Passes(opt)
        >>> def forward_backward(x):
        ...     model(x).square().mean().backward()
        >>> for x in torch.randn(2, 8, 4):
        ...     passes.record(forward_backward, x)
        ...     forward_backward(x)
        >>> passes.repeat_at_probe()
        True
        >>> opt.step()
        >>> opt.steps
        1
    """

    def __init__(self, optimizer: Any, ranks: int = 1) -> None:
        self._optimizer = inner_optimizer(optimizer)
        learn_together(self._optimizer, ranks)
        self._recorded: list[_Pass] = []
        self.repeating = False

    def record(self, forward_backward: Callable[..., object], *args: Any) -> None:
        """Call this just before a forward and backward pass at the centre.

        `forward_backward(*args)` must be able to repeat it later: what belongs to one micro-batch is an argument. If
        that pass fails and the loop goes on without it, call `forget`.
        """
        if self._optimizer is None or self.repeating:
            return
        if not self._recorded:
            gradients.clear_left(self._optimizer._order())  # of the step before, if nobody has zeroed them
            self._optimizer._find_modules()
            self._optimizer._modules.mark()
        self._recorded.append(_Pass(RandomState(self._optimizer._order()), forward_backward, args))

    def run(self, backward: Callable[[Tensor], object], compute_loss: Callable[..., Tensor], *args: Any) -> Tensor:
        """Record and make a pass at the centre, with a framework's own `backward`; returns the loss."""
        return self.make(_forward_backward, backward, compute_loss, *args)

    def make(self, forward_backward: Callable[..., T], *args: Any) -> T:
        """Record and make a pass at the centre; one that fails is not recorded, because the loop may go on without it.

        Returns what the pass does.
        """
        before = len(self._recorded)
        self.record(forward_backward, *args)
        try:
            return forward_backward(*args)
        except BaseException:
            del self._recorded[before:]
            raise

    def forget(self) -> None:
        """Repeat none of the passes since the last step, whose gradients the loop has dropped."""
        self._recorded.clear()

    def repeat_at_probe(
        self,
        *,
        batch: Any = None,
        grad_scaler: Any = None,
        unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext,
        refreshing: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    ) -> bool:
        """Refresh if due, move to the probe, and leave the gradients of all recorded passes there.

        Returns whether a step has begun, which the optimizer's `step` ends; it has not if there are no gradients.

        Args:
            batch: what a refresh learns from, unless the geometry draws its own batches.
            grad_scaler: the framework's; its loss scale is in the present gradients.
            unsynced: entered for every pass but the last, which alone needs to reduce gradients over the ranks.
            refreshing: entered with the geometry's model while a refresh may run.
        """
        recorded, self._recorded = self._recorded, []
        optimizer = self._optimizer
        if optimizer is None or all(parameter.grad is None for parameter in optimizer._order()):
            return False
        geometry = optimizer.geometry
        draws = getattr(geometry, "batches", None) is not None
        with nullcontext() if geometry is None or geometry.model is None else refreshing(geometry.model):
            # Before the probe begins there is no second pass, and the step takes the present gradients.
            optimizer.first_step(batch=None if draws else batch, grad_scaler=grad_scaler, zero_grad=False)
        if not optimizer._probing:
            return True
        if not recorded:
            optimizer.restore()
            raise RuntimeError("repeat_at_probe: no pass was recorded; call record() before each pass at the centre")
        self.repeating = True
        try:
            optimizer.zero_grad()
            with optimizer._modules.rewound(keep=not optimizer._buffers_of_probe):
                for i, one in enumerate(recorded, start=1):
                    drawn = repeated(one.random, optimizer._order()) if optimizer._same_dropout else nullcontext()
                    with drawn, nullcontext() if i == len(recorded) else unsynced():
                        one.repeat()
        except BaseException:
            optimizer.restore()
            raise
        finally:
            self.repeating = False
        return True

    def end(self) -> None:
        """Go back to the centre if the framework has decided against a step."""
        if self._optimizer is not None and self._optimizer._run.between:
            self._optimizer.restore()


def _forward_backward(backward: Callable[[Tensor], object], compute_loss: Callable[..., Tensor], *args: Any) -> Tensor:
    loss = compute_loss(*args)
    backward(loss)
    return loss.detach()


def learn_together(optimizer: Optimizer | None, ranks: int) -> None:
    """Let the processes that train one model learn one metric, which a geometry of the bare model does not know of."""
    if optimizer is not None and ranks > 1 and isinstance(optimizer.geometry, Geometry):
        assert dist.group.WORLD is not None
        optimizer.geometry.linearizer.learn_with(dist.group.WORLD)


def inner_optimizer(optimizer: Any) -> Optimizer | None:
    """The `llqr.Optimizer` inside a framework's wrapper; None if there is none."""
    # The wrappers may inherit from the class of what they wrap, so that `isinstance` alone would stop too early.
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, Optimizer) else None


#: Of a batch that is a list, a tuple or a mapping, which are looked at.
MEMBERS = 8


def _tensors_around(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function's free names stand for now, where that is a tensor or holds one, such as a batch."""
    return {name: value for name, value in _surroundings(function).items() if _holds_tensors(value)}


def _surroundings(function: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(function, FunctionType):
        return {}
    names = _global_names(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # deleted, or not assigned yet
            found.pop(name, None)
    return found


@functools.lru_cache(maxsize=256)
def _global_names(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def _holds_tensors(value: Any) -> bool:
    """Looks at a few members only: a function may also know of a whole data set."""
    if isinstance(value, Mapping):
        value = list(itertools.islice(value.values(), MEMBERS))
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(member, Tensor) for member in value[:MEMBERS])
    )
