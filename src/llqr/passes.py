"""The two passes of a step: what they change, and how everything but the update is put back, whatever raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import is_lazy

from llqr.caller_warnings import warn
from llqr.checks import LIGHTNING, NO_GRADIENTS, OUTSIDE, check_gradients, is_lightnings
from llqr.distributed.dtensors import Sharding, any_sharded, drop_gathered, is_sharded, local, sharded_like
from llqr.probes.norms import length
from llqr.probes.sam import Point
from llqr.schedule import check_number
from llqr.state import Wrapper, has_own_radius

Closure = Callable[[], Any]
#: An attribute of gradients that a finished step leaves behind: their version at that time.
LEFT = "_left_by_llqr"


class Step:
    """One step, from its first pass to the base optimizer's update.

    As a context it restores weights and buffers, and makes the probe forget the step, if anything inside raises.

    Args:
        optimizer: whose parameters move.
        closure: runs a pass; None if the gradients of the first pass are there already.
        grad_scaler: the `torch.amp.GradScaler` of the closure's loss, if any.
    """

    def __init__(self, optimizer: TwoCalls, closure: Closure | None, grad_scaler: Any = None) -> None:
        self.parameters = optimizer._order()
        self.scaler = _enabled(grad_scaler)
        #: Whether `first_step` has been called and `second_step` has not.
        self.open = False
        self.probing = optimizer.probing
        self._optimizer, self._closure = optimizer, closure
        self._sharded = any_sharded(self.parameters)
        if self._sharded and self.parameters[0] not in optimizer.names:  # Accelerate has sharded them since
            optimizer._notice_parameters()
        self._radii = {p: own for g, own in own_radii(optimizer.base) if own is not None for p in g["params"]}
        self._random: RandomState | None = None
        self._overflow = False
        self._noted: dict[str, Any] = {}

    def __enter__(self) -> Step:
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
        optimizer, probing = self._optimizer, self.probing
        if probing and not optimizer._run.warned and is_lightnings(self._closure):
            warn(LIGHTNING)
            optimizer._run.warned = True
        self._forget_unscaled()
        outside = None if optimizer.probe is None else take_over(self.parameters)  # as strict in steps of one pass
        if probing and optimizer._same_dropout:
            self._random = RandomState(self.parameters)
        if probing and optimizer._buffers_of_probe:
            optimizer._buffers.hold()
        unsynced = optimizer._no_sync if probing and optimizer._no_sync is not None else nullcontext
        with unsynced(), torch.enable_grad():
            loss = self._closure()
        if outside is not None and outside.grad is not None and local([outside.grad])[0].isnan().all():
            raise RuntimeError(OUTSIDE)
        if isinstance(loss, Tensor):  # a closure may write the losses of both passes into the same memory
            loss = loss.detach().clone()
        self.note(loss=loss)
        return loss, self.point()

    def at(self, eps: list[Tensor], centre: Point) -> Point:
        """The second pass: the gradients at `theta + eps`, with the random numbers of the first; back to `theta`."""
        assert self._closure is not None
        self.move(eps, centre)
        self._forget_unscaled()
        for done in (eps, centre.grads):  # the second pass, in which most memory is held, needs neither
            done.clear()
        buffers = self._optimizer._buffers
        buffers.restore() if self._optimizer._buffers_of_probe else buffers.hold()
        clear(self.parameters)
        now = None if self._random is None else RandomState(self.parameters)
        try:
            if self._random is not None:
                self._random.restore()
            with torch.enable_grad():
                loss = self._closure()
            self.note(loss_at_probe=loss)
        finally:
            if now is not None:
                now.restore()  # the second pass may have drawn fewer numbers than the first
        self.back()
        return self.point()

    def move(self, eps: list[Tensor], centre: Point) -> None:
        """`theta <- theta + eps`, after a copy of `theta` is taken."""
        optimizer = self._optimizer
        weights = local(centre.parameters) if self._sharded else centre.parameters
        if optimizer.measure:
            self.note(passes=2, displacement=length(eps, centre))
        if self._overflow and optimizer.probe is not None:
            # At the centre the second pass overflows again, for every rank, so that the scaler skips the step.
            optimizer.probe.undo()
            torch._foreach_zero_(eps)
        downhill = {p for group in optimizer.param_groups if group.get("maximize") for p in group["params"]}
        if downhill:
            torch._foreach_neg_([part for p, part in zip(centre.parameters, eps, strict=True) if p in downhill])
        optimizer._weights.take(weights)
        optimizer._run.begun = self
        self._forget_copies()
        torch._foreach_add_(weights, eps)

    def back(self) -> None:
        """Weights and buffers go back to the centre, bit by bit, if they are not there already."""
        if self.away:
            self._forget_copies()
            self._optimizer._weights.restore()
        self._optimizer._buffers.restore()
        if not self.open:
            self._optimizer._run.begun = None

    @property
    def away(self) -> bool:
        """Whether the weights are at the probe."""
        return self._optimizer._weights.held

    def point(self) -> Point:
        """The parameters that have a gradient, and these gradients without the loss scale."""
        optimizer = self._optimizer
        parameters = [p for p in self.parameters if p.grad is not None]
        grads = [g for p in parameters if (g := p.grad) is not None]
        if optimizer.probe is not None or optimizer.geometry is not None:
            check_gradients(parameters, grads, optimizer.names)
            grads = grads if self._sharded else separated(parameters, grads)
        self._overflow = self.scaler is not None and bool(grads) and not unscale(self.scaler, optimizer, optimizer.base)
        sharding = Sharding(parameters) if self._sharded else None
        if sharding is not None:
            grads = local(sharded_like(parameters, grads))
        point = Point(parameters, grads, optimizer.names, self._radii, sharding, self._closure is not None)
        if optimizer.measure and "gradient_norm" not in self._noted and grads:
            self.note(gradient_norm=length(grads, point))
        return point

    def note(self, **found: Any) -> None:
        """What `Optimizer.last` tells about this step; copies, because a captured closure writes to the same memory."""
        if self._optimizer.measure:
            self._noted |= {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in found.items()}

    def descend(self, g: Point, Ug: list[Tensor]) -> bool:
        """The base optimizer's step on `U g`; False if there was none to do, or an overflow skips it."""
        base, run = self._optimizer.base, self._optimizer._run
        if self._overflow:
            return False
        if not g.grads:
            base.step()  # for its hooks; without gradients torch's optimizers do nothing
            if not run.warned:
                warn(NO_GRADIENTS)
            run.warned = True
            return False
        max_norm = self._optimizer.max_norm
        if max_norm is not None and g.sharding is not None:  # torch wants all gradients sharded, and on one mesh
            norm = length(Ug, g)
            torch._foreach_mul_(Ug, (max_norm / (norm + 1e-6)).clamp(max=1))
            self.note(update_norm=norm)
        joined = Ug if g.sharding is None else g.sharding.joined(Ug)
        with nullcontext() if Ug is g.grads else substituted(g.parameters, joined):
            if max_norm is not None and g.sharding is None:
                self.note(update_norm=nn.utils.clip_grad_norm_(g.parameters, max_norm))
            base.step() if self.scaler is None else self.scaler.step(base)
        torch.clear_autocast_cache()
        if self._optimizer.measure:
            run.last = {"step": run.steps, "passes": 1} | {k: x for k, x in self._noted.items() if x is not None}
        return True

    def _forget_copies(self) -> None:
        """Copies of the weights that torch keeps: gathered by FSDP2, or in low precision by a surrounding autocast."""
        model = self._optimizer.model
        if model is not None and self._sharded:
            drop_gathered(model.modules())
        torch.clear_autocast_cache()

    def _forget_unscaled(self) -> None:
        """Let the scaler unscale again, because the next pass scales its loss again."""
        if self.scaler is None:
            return
        states = self.scaler._per_optimizer_states
        for optimizer in (self._optimizer, self._optimizer.base):
            if id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED:
                del states[id(optimizer)]


class TwoCalls(Wrapper):
    """`first_step` and `second_step`, for loops that cannot use a closure."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._weights, self._buffers = Snapshot(), Buffers(self.model)

    if TYPE_CHECKING:  # the algorithm, see llqr.sam

        @property
        def probing(self) -> bool: ...
        def _refresh(self, batch: Any) -> None: ...
        def _displacement(self, g: Point) -> list[Tensor]: ...
        def _descend(self, step: Step, g: Point) -> None: ...

    @_disable_dynamo
    @torch.no_grad()
    def first_step(self, *, batch: Any = None, grad_scaler: Any = None, zero_grad: bool = True) -> None:
        """Move the weights to the probe, using the present gradients. Then run the second pass yourself.

        Clears the present gradients, so that the second pass does not add to them; with `zero_grad=False` clear them
        yourself.
        """
        if self._begun:
            raise RuntimeError("first_step: called twice without second_step() or restore() between")
        self._refresh(batch)
        with Step(self, None, grad_scaler) as step:
            self._run.begun, step.open = step, True
            if step.probing and (g := step.point()).grads:
                step.move(self._displacement(g), g)
            if not self._buffers_of_probe:
                self._buffers.hold()
            step._forget_unscaled()
            if zero_grad:
                clear(step.parameters)

    @_disable_dynamo
    @torch.no_grad()
    def second_step(self, *, grad_scaler: Any = None, zero_grad: bool = False) -> None:
        """Restore the weights and descend with the gradients taken at the probe."""
        if not self._begun and (self.probing or self.geometry is not None):
            raise RuntimeError("second_step: call first_step() first")
        self._finish(None, grad_scaler)
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Abandon a step: weights and buffers go back to the centre, and the probe forgets it."""
        if self._run.begun is not None:
            self._run.begun.open = False
            self._run.begun.back()
        if self.probe is not None:
            self.probe.undo()

    @property
    def _begun(self) -> bool:
        """Whether `first_step` has been called, and `second_step` has not."""
        if self._run.begun is not None and not self._run.begun.open:
            self.restore()  # an exception interrupted it
        return self._run.begun is not None

    def _finish(self, closure: Closure | None, grad_scaler: Any) -> Any:
        """The rest of a step, after `first_step`."""
        with self._run.begun or Step(self, None) as step:
            if grad_scaler is not None:
                step.scaler = _enabled(grad_scaler)
            with torch.enable_grad():
                loss = None if closure is None else closure()
            step.open = False
            step.back()
            self._run.called = True
            self._descend(step, step.point())
        return loss


def _enabled(scaler: Any) -> Any:
    return scaler if scaler is not None and scaler.is_enabled() else None


# -- gradients ---------------------------------------------------------------------------------------------------------


def take_over(parameters: Sequence[Tensor]) -> Tensor | None:
    """Clear the gradients of the last step. Returns a parameter whose gradient is from outside the closure, if any.

    Looks at the first gradient only, and fills one from outside with NaN, which stays if the closure adds to it.
    """
    outside, gradient = None, _first_gradient(parameters)
    if gradient is not None and getattr(gradient, LEFT, None) != _version(gradient):
        (part,) = local([gradient])
        if part.layout == torch.strided and part.any():
            part.fill_(float("nan"))
            outside = next(p for p in parameters if p.grad is gradient)
    clear(parameters if outside is None else [p for p in parameters if p is not outside])
    return outside


def leave(parameters: Sequence[Tensor]) -> None:
    """Mark the first gradient as that of a finished step, so that the next step clears them all."""
    gradient = _first_gradient(parameters)
    if gradient is not None:
        setattr(gradient, LEFT, _version(gradient))


def _first_gradient(parameters: Sequence[Tensor]) -> Tensor | None:
    return next((gradient for p in parameters if (gradient := p.grad) is not None), None)


def _version(gradient: Tensor) -> int:
    """Changes whenever the gradient is written to; FSDP2 writes to the local part."""
    return gradient._version if type(gradient) is Tensor else local([gradient])[0]._version


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


def separated(parameters: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients, each in memory of its own, because a step scales them in place.

    `torch.autograd.grad` may return one tensor for two parameters, or an expanded one.
    """
    seen: set[int] = set()
    for i, gradient in enumerate(grads):
        if (address := gradient.data_ptr()) in seen or is_expanded(gradient):
            parameters[i].grad = grads[i] = gradient.clone()
        seen.add(address)
    return grads


def is_expanded(tensor: Tensor) -> bool:
    """Whether several entries are one number in memory."""
    return 0 in tensor.stride() and torch._debug_has_internal_overlap(tensor) == 1


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


def own_radii(base: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], float | None]]:
    """The parameter groups and their `"rho"`: None if it is the probe's, or a setting of the base (as in Adadelta)."""
    for i, group in enumerate(base.param_groups):
        own = None if "rho" in getattr(base, "defaults", ()) or not has_own_radius(group) else group["rho"]
        yield group, own if own is None else check_number(f"param_groups[{i}]['rho']", own, 0)


def unscale(scaler: Any, wrapper: torch.optim.Optimizer, base: torch.optim.Optimizer) -> bool:
    """Remove the loss scale from the gradients, unless the caller has done so to clip; whether they are finite."""
    states = scaler._per_optimizer_states
    if states[id(wrapper)]["stage"] is OptState.UNSCALED:
        states[id(base)] = states.pop(id(wrapper))  # both have the same gradients
    elif states[id(base)]["stage"] is not OptState.UNSCALED:
        scaler.unscale_(base)
    return not any(bool(found) for found in states[id(base)]["found_inf_per_device"].values())


# -- what is put back --------------------------------------------------------------------------------------------------


class RandomState:
    """The state of the host's generator and of those of the parameters' CUDA devices, taken when constructed."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        devices = {parameter.device.index for parameter in parameters if parameter.is_cuda}
        generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


class Snapshot:
    """Remembers the contents of tensors and puts them back, bit by bit."""

    def __init__(self) -> None:
        self._pairs: list[tuple[list[Tensor], Sequence[Tensor]]] = []
        self.held = False

    def take(self, tensors: Sequence[Tensor]) -> None:
        # By device and dtype: a mixed list (BatchNorm counts in integers) would be copied tensor by tensor.
        groups: dict[object, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        with torch.no_grad():
            self._pairs = [(own, _cloned(own)) for own in groups.values()]
        self.held = True

    def restore(self) -> None:
        """Put the remembered contents back, if there are any."""
        with torch.no_grad():
            for own, copies in self._pairs:
                torch._foreach_copy_(own, list(copies))
        self._pairs, self.held = [], False


def _cloned(tensors: list[Tensor]) -> Sequence[Tensor]:
    if hasattr(torch, "_foreach_clone"):
        return torch._foreach_clone(tensors)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class Buffers:
    """The buffers of a model (BatchNorm statistics): their contents, and which tensors they are."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._held: list[tuple[nn.Module, str, Tensor]] = []
        self._contents = Snapshot()

    def hold(self) -> None:
        if self._model is None:
            return
        modules = self._model.modules()
        self._held = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        if self._held:
            self._contents.take(list({id(buffer): buffer for _, _, buffer in self._held if _writable(buffer)}.values()))

    def restore(self) -> None:
        """Put back what `hold` remembered, if anything; a module may have replaced its buffers by new ones."""
        if not self._held:
            return
        for owner, name, buffer in self._held:
            if name not in owner._buffers or owner._buffers[name] is not buffer:
                setattr(owner, name, buffer)
        self._held = []
        self._contents.restore()


def _writable(buffer: Tensor) -> bool:
    """Whether a pass can write to it: not if it has no shape yet, was made in inference mode, or is expanded."""
    if is_lazy(buffer) or buffer.is_inference():
        return False
    return buffer.layout != torch.strided or not is_expanded(buffer)
