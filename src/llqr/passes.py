"""The two passes of a step: what they change, and how everything but the update is put back, whatever raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from llqr.caller_warnings import warn
from llqr.checks import OUTSIDE, check_gradients
from llqr.distributed.dtensors import Sharding, drop_gathered, is_sharded, local, sharded_like
from llqr.probes.sam import Point
from llqr.random_state import RandomState
from llqr.schedule import check_number
from llqr.state import Wrapper

Closure = Callable[[], Any]
#: An attribute of gradients that a finished step leaves behind: their version at that time.
LEFT = "_left_by_llqr"


class TwoPasses:
    """One step between its first pass and the base optimizer's update.

    As a context it restores weights and buffers, and makes the probe forget the step, if anything inside raises.

    Args:
        optimizer: whose parameters move.
        closure: runs a pass; None if the gradients of the first pass are there already.
        grad_scaler: the `torch.amp.GradScaler` of the closure's loss, if any.
    """

    def __init__(self, optimizer: TwoCalls, closure: Closure | None, grad_scaler: Any = None) -> None:
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.scaler = _enabled(grad_scaler)
        #: Whether `first_step` has been called and `second_step` has not.
        self.open = False
        self._optimizer, self._closure = optimizer, closure
        self._random: RandomState | None = None
        self._overflow = False

    def __enter__(self) -> TwoPasses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._optimizer.restore()
        if not self.open:
            self._optimizer._buffers.restore()  # held for a second pass that did not take place
            leave(self.parameters)

    def centre(self) -> tuple[Any, Point]:
        """The first pass: its loss, and the gradients at the centre."""
        if self._closure is None:
            return None, self.point()
        optimizer = self._optimizer
        outside = take_over(self.parameters) if optimizer._probing else []
        with ExitStack() as contexts:
            if optimizer._probing:
                if optimizer._same_dropout:
                    self._random = RandomState(self.parameters)
                if optimizer._buffers_of_probe:
                    optimizer._buffers.hold()
                if optimizer._no_sync is not None:
                    contexts.enter_context(optimizer._no_sync())
            contexts.enter_context(torch.enable_grad())
            loss = self._closure()
        refuse_added(outside)
        return _detached(loss), self.point()

    def at(self, eps: list[Tensor], centre: Point) -> Point:
        """The second pass: the gradients at `theta + eps`, with the random numbers of the first; back to `theta`."""
        self.move(eps, centre)
        buffers = self._optimizer._buffers
        buffers.restore() if self._optimizer._buffers_of_probe else buffers.hold()
        clear(self.parameters)
        assert self._closure is not None
        now = RandomState(self.parameters)
        try:
            if self._random is not None:
                self._random.restore()
            with torch.enable_grad():
                self._closure()
        finally:
            if self._random is not None:
                now.restore()  # the second pass may have drawn fewer numbers than the first
        self.back()
        return self.point()

    def move(self, eps: list[Tensor], centre: Point) -> None:
        """`theta <- theta + eps`, after a copy of `theta` is taken."""
        optimizer, weights = self._optimizer, centre.weights
        if self._overflow:
            # NaN weights make the second pass overflow too, on every rank, so that the scaler skips the step.
            assert optimizer.probe is not None
            optimizer.probe.undo()
            torch._foreach_mul_(eps, float("nan"))
        downhill = {p for group in optimizer.param_groups if group.get("maximize") for p in group["params"]}
        if downhill:
            torch._foreach_neg_([part for p, part in zip(centre.parameters, eps, strict=True) if p in downhill])
        optimizer._weights.take(weights)
        optimizer._run.passes = self
        self._forget_copies()
        torch._foreach_add_(weights, eps)
        if self.scaler is not None:
            self.scaler._per_optimizer_states.pop(id(optimizer.base), None)  # the second pass scales its loss again

    def back(self) -> None:
        """Weights and buffers go back to the centre, bit by bit, if they are not there already."""
        optimizer = self._optimizer
        if optimizer._weights.held:
            self._forget_copies()
            optimizer._weights.restore()
            torch.clear_autocast_cache()
        optimizer._buffers.restore()
        if not self.open:
            optimizer._run.passes = None

    def descend(self, there: Point, Ug: list[Tensor] | None) -> bool:
        """The base optimizer's step on `U g`, or on the gradients as they are; False if the loss scale skips it."""
        if self.scaler is not None and self._overflow:
            return False
        base = self._optimizer.base
        if Ug is None:
            self._step(base)
        else:
            grads = Ug if there.sharding is None else there.sharding.joined(Ug)
            with substituted(there.parameters, grads):
                self._step(base)
        torch.clear_autocast_cache()
        return True

    def _step(self, base: torch.optim.Optimizer) -> None:
        base.step() if self.scaler is None else self.scaler.step(base)

    def point(self) -> Point:
        """The parameters that have a gradient, and these gradients without the loss scale."""
        optimizer = self._optimizer
        pairs = [(p, g) for p in self.parameters if (g := p.grad) is not None]
        parameters, grads = [p for p, _ in pairs], [g for _, g in pairs]
        if optimizer.probe is not None or optimizer.geometry is not None:
            check_gradients(parameters, grads, optimizer.names)
        if self.scaler is not None and grads:
            self._overflow = not unscale(self.scaler, optimizer, optimizer.base)
        sharding = Sharding.of(parameters)
        if sharding is not None:
            grads = local(sharded_like(parameters, grads))
        return Point(parameters, grads, optimizer.names, radii(optimizer.base), sharding)

    def _forget_copies(self) -> None:
        """Copies of the weights that torch keeps: gathered by FSDP2, or in low precision by a surrounding autocast."""
        model = self._optimizer.model
        if model is not None and any(map(is_sharded, self.parameters)):
            drop_gathered(model.modules())
        torch.clear_autocast_cache()


class TwoCalls(Wrapper):
    """`first_step` and `second_step`, for loops that cannot use a closure."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._weights, self._buffers = Snapshot(), Buffers(self.model)

    if TYPE_CHECKING:  # the algorithm, see llqr.sam
        _probing: bool
        _no_sync: Callable[[], AbstractContextManager[Any]] | None
        _same_dropout: bool
        _buffers_of_probe: bool

        def _refresh(self, batch: Any) -> None: ...
        def _displacement(self, g: Point) -> list[Tensor]: ...
        def _descend(self, passes: TwoPasses, g: Point) -> None: ...

    @torch._disable_dynamo
    @torch.no_grad()
    def first_step(self, *, batch: Any = None, grad_scaler: Any = None, zero_grad: bool = True) -> None:
        """Move the weights to the probe, using the present gradients. Then run the second pass yourself.

        Clears the present gradients, so that the second pass does not add to them; with `zero_grad=False` clear them
        yourself.
        """
        if self._begun:
            raise RuntimeError("first_step: called twice without second_step() or restore() between")
        self._refresh(batch)
        with TwoPasses(self, None, grad_scaler) as passes:
            self._run.passes, passes.open = passes, True
            g = passes.point() if self._probing else None
            if g is not None and g.grads:
                passes.move(self._displacement(g), g)
            if not self._buffers_of_probe:
                self._buffers.hold()
            if zero_grad:
                clear(passes.parameters)

    @torch._disable_dynamo
    @torch.no_grad()
    def second_step(self, *, grad_scaler: Any = None, zero_grad: bool = False) -> None:
        """Restore the weights and descend with the gradients taken at the probe."""
        if not self._begun and (self._probing or self.geometry is not None):
            raise RuntimeError("second_step: call first_step() first")
        self._finish(None, grad_scaler)
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Abandon a step: weights and buffers go back to the centre, and the probe forgets it."""
        if self._run.passes is not None:
            self._run.passes.open = False
            self._run.passes.back()
        if self.probe is not None:
            self.probe.undo()

    @property
    def _begun(self) -> bool:
        """Whether `first_step` has been called, and `second_step` has not."""
        if self._run.passes is not None and not self._run.passes.open:
            self.restore()  # an exception interrupted it
        return self._run.passes is not None

    def _finish(self, closure: Closure | None, grad_scaler: Any) -> Any:
        """The rest of a step, after `first_step`."""
        with self._run.passes or TwoPasses(self, None) as passes:
            if grad_scaler is not None:
                passes.scaler = _enabled(grad_scaler)
            with torch.enable_grad():
                loss = None if closure is None else closure()
            passes.open = False
            passes.back()
            self._run.called = True
            self._descend(passes, passes.point())
        return loss

    def _do_nothing(self) -> None:
        """Without gradients torch's optimizers do nothing, hooks aside."""
        self.base.step()
        if self.probe is not None:
            self.probe.undo()
        if not self._run.warned:
            self._run.warned = True
            warn(
                "step: no parameter of the optimizer got a gradient, so that nothing moved; does the closure call "
                "backward()? (said once)"
            )


def _enabled(scaler: Any) -> Any:
    return scaler if scaler is not None and scaler.is_enabled() else None


def _detached(loss: Any) -> Any:
    """A copy, because a captured closure writes the losses of both passes into the same memory."""
    if isinstance(loss, Tensor):
        return loss.detach().clone()
    return pytree.tree_map_only(Tensor, lambda part: part.detach().clone(), loss)


# -- gradients ---------------------------------------------------------------------------------------------------------


def take_over(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Clear the gradients that a step has left; fill others with NaN, to see whether the closure zeroes them."""
    outside = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided or getattr(gradient, LEFT, None) == _version(gradient):
            continue
        if bool(local([gradient])[0].any()):
            outside.append((parameter, gradient))
    if outside:
        torch._foreach_mul_(local([gradient for _, gradient in outside]), float("nan"))
        parameters = list(set(parameters).difference(parameter for parameter, _ in outside))
    clear(parameters)
    return outside


def refuse_added(outside: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Refuse a closure that has added to gradients from outside, which the second pass would need at the probe."""
    if any(p.grad is gradient and bool(local([gradient])[0].isnan().all()) for p, gradient in outside):
        raise RuntimeError(OUTSIDE)


def leave(parameters: Iterable[Tensor]) -> None:
    """Mark the gradients as those of a step that is over: the next step clears them."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            setattr(gradient, LEFT, _version(gradient))


def clear(parameters: Iterable[Tensor]) -> None:
    """Remove the gradients. On a CUDA device zero them in place, because a captured closure writes to their memory."""
    captured = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_cuda and gradient.layout == torch.strided and not is_sharded(gradient):
            captured.append(gradient)
        else:
            parameter.grad = None
    if captured:
        torch._foreach_zero_(captured)


def _version(gradient: Tensor) -> int:
    """Changes whenever the gradient is written to; FSDP2 writes to the local part."""
    return gradient._version if type(gradient) is Tensor else local([gradient])[0]._version


@contextmanager
def substituted(parameters: Sequence[Tensor], Ug: Sequence[Tensor]) -> Iterator[None]:
    """`Ug` as the gradients of `parameters`; at the end they have their own again, to which a captured closure writes.

    A `Ug` in another memory order or dtype is copied first: fused optimizers read weights and gradients in one order.
    """
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient, other in zip(parameters, own, Ug, strict=True):
            assert gradient is not None
            same = gradient.stride() == other.stride() and gradient.dtype == other.dtype
            parameter.grad = other if same else torch.empty_like(gradient).copy_(other)
        yield
    finally:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


def radii(base: torch.optim.Optimizer) -> dict[Tensor, float]:
    """The `"rho"` of parameter groups that have one, unless it is a setting of the base optimizer (as in Adadelta)."""
    found: dict[Tensor, float] = {}
    for i, group in enumerate(base.param_groups):
        if group.get("rho") is not None and "rho" not in base.defaults:
            found |= dict.fromkeys(group["params"], check_number(f"param_groups[{i}]['rho']", group["rho"], 0))
    return found


def unscale(scaler: Any, wrapper: torch.optim.Optimizer, base: torch.optim.Optimizer) -> bool:
    """Remove the loss scale from the gradients, unless the caller has done so to clip; whether they are finite."""
    states = scaler._per_optimizer_states
    if states[id(wrapper)]["stage"] is OptState.UNSCALED:
        states[id(base)] = states.pop(id(wrapper))  # both have the same gradients
    elif states[id(base)]["stage"] is not OptState.UNSCALED:
        scaler.unscale_(base)
    return not any(bool(found) for found in states[id(base)]["found_inf_per_device"].values())


# -- weights and buffers -----------------------------------------------------------------------------------------------


class Snapshot:
    """Remembers the contents of tensors and puts them back, bit by bit."""

    def __init__(self) -> None:
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []
        self.held = False

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        # By device and dtype: a mixed list (BatchNorm counts in integers) would be copied tensor by tensor.
        groups: dict[object, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._pairs = [(own, [torch.empty_like(tensor) for tensor in own]) for own in groups.values()]
        for own, copies in self._pairs:
            torch._foreach_copy_(copies, own)
        self.held = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered contents back, if there are any."""
        if self.held:
            for own, copies in self._pairs:
                torch._foreach_copy_(own, copies)
            self._pairs, self.held = [], False

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.nbytes for _, copies in self._pairs for copy in copies)

    def __getstate__(self) -> dict[str, object]:
        return Snapshot().__dict__


class Buffers:
    """The buffers of a model (BatchNorm statistics): their contents, and which tensors they are."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._held: list[tuple[nn.Module, str, Tensor]] = []
        self._contents = Snapshot()
        self.look_again()

    def look_again(self) -> None:
        """The model may have new parts."""
        self._modules = [] if self._model is None else list(self._model.modules())

    def hold(self) -> None:
        self._held = [(m, name, b) for m in self._modules for name, b in m._buffers.items() if b is not None]
        self._contents.take(list({id(buffer): buffer for _, _, buffer in self._held if _writable(buffer)}.values()))

    def restore(self) -> None:
        """Put back what `hold` remembered, if anything; a module may have replaced its buffers by new ones."""
        for owner, name, buffer in self._held:
            if name not in owner._buffers or owner._buffers[name] is not buffer:
                setattr(owner, name, buffer)
        self._held = []
        self._contents.restore()


def _writable(buffer: Tensor) -> bool:
    """Whether a pass can write to it: not if it has no shape yet, is of inference mode, or is expanded."""
    if is_lazy(buffer) or buffer.is_inference():
        return False
    return buffer.layout != torch.strided or not any(
        size > 1 and step == 0 for size, step in zip(buffer.shape, buffer.stride(), strict=True)
    )
