"""The one wrapper: refresh if due, centre gradient, probe, gradient at the probe, transport by `U`, base step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import is_
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.caller_warnings import warn
from llqr.checks import (
    check_base,
    check_closure,
    check_geometry,
    check_parameters,
    check_settings,
    refuse_class,
)
from llqr.distributed.dtensors import Sharding, any_sharded, as_sharded, drop_gathered, local, refuse_fsdp1
from llqr.geometry import GeometryLike
from llqr.never_compiled import never_compiled
from llqr.probes import Point, SAMProbe
from llqr.random_state import RandomState, repeated
from llqr.step import amp, gradients
from llqr.step.derived_weights import forget_derived_weights
from llqr.step.modules import OwningModules
from llqr.step.other_gradients import OtherGradients
from llqr.step.outside_gradients import OutsideGradients
from llqr.step.param_groups import own_radius, point_uphill
from llqr.step.snapshot import Snapshot
from llqr.step.steps_in_backward import refuse_steps_in_backward
from llqr.step.wrapper import Wrapper

Closure = Callable[[], Any]


class Optimizer(Wrapper):
    """Any point of probe x metric x transport x base optimizer.

    Args:
        base: a constructed optimizer (SGD, AdamW, ...). Its `param_groups` and `state` *are* this optimizer's, so that
            schedulers may be built on either. Weight decay and momentum are left to it, after the metric.
        probe: where SAM looks; None for plain descent.
        geometry: the learned metric `U`; None for the identity.
        transport: whether the update gradient goes through `U` (False is the paper's LLQR^Delta).
        model: its buffers (BatchNorm statistics) are protected during the second pass. By default found at the first
            step: the modules that own the parameters, and others whose buffers the first pass writes to.
        no_sync: `ddp_model.no_sync` makes the probe each rank's own (m-sharpness).
        same_dropout: both passes of a step see the same random numbers: those of torch, of Python's `random` and of
            `numpy.random`, but not those of a generator of your own.
        buffers: which pass writes the model's buffers (BatchNorm statistics): "centre" the first, "probe" the second,
            from where they were before the step. In the two-call form, `first_step` comes after the first pass, so that
            with "probe" both passes write.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = Optimizer(base, SAMProbe(rho=0.05))
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> float(opt.step(closure)) > 0
        True
    """

    # With this, torch's GradScaler passes itself to `step`, which must unscale between its two passes.
    _step_supports_amp_scaling = True

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Before Python complains about arguments: other packages construct SAM from parameters and a class."""
        refuse_class(cls.__name__, (*args[1:], *settings.values()))
        return super().__new__(cls)

    def __init__(
        self,
        base: torch.optim.Optimizer,
        probe: SAMProbe | None = None,
        geometry: GeometryLike | None = None,
        *,
        transport: bool = True,
        model: nn.Module | None = None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
        same_dropout: bool = True,
        buffers: Literal["centre", "probe"] = "centre",
    ) -> None:
        check_base(base)
        if probe is not None and not isinstance(probe, SAMProbe):
            raise TypeError(f"probe: expected a llqr.SAMProbe (or None), got {probe!r}")
        if geometry is not None:
            check_geometry(geometry, base)
        check_settings(transport, model, no_sync, same_dropout, buffers)
        if no_sync is not None and getattr(geometry, "shards", 1) > 1:
            raise ValueError(
                "no_sync: a probe of each rank's own gradient needs the whole metric on every rank; leave out "
                "Geometry(shards=...) or no_sync"
            )
        super().__init__(base, probe, geometry)
        check_parameters(self._order(), own_probes=no_sync is not None)
        self._run.parameters = self._order()
        self._claim()
        self.transport = transport
        self._no_sync = no_sync
        self._same_dropout = same_dropout
        self._buffers_of_probe = buffers == "probe"
        inner = None if geometry is None else geometry.model
        self._modules = OwningModules(model) if model is not None else OwningModules(inner, more=True)
        self._others = OtherGradients()
        self._weights = Snapshot()  # frees its memory: a refresh and the base's step have their own peaks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "base"):
            self.base.add_param_group(param_group)
            self._notice_groups()

    def _notice_groups(self) -> None:
        """Other parameters may be those of a new part of the model. The base may have got them past this wrapper."""
        before, now = self._run.parameters, self._order()
        if len(before) != len(now) or not all(map(is_, before, now)):
            self._run.parameters = now
            check_parameters(now, own_probes=self._no_sync is not None)
            self._modules.forget()
            self._others.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)
        if not set_to_none:
            gradients.leave(self._order())

    # -- the step ------------------------------------------------------------------------------------------------------

    @never_compiled
    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, batch: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step; returns the loss at the centre.

        Gradients that are there before the step: those of the step before are cleared, so that nobody has to zero
        them. Those of a backward pass outside the closure are the caller's: without a probe the closure adds to them,
        as in torch; with one, a closure that adds to them is refused, because the second pass needs them at the probe.
        A closure that zeroes the gradients first, as usual, is never affected. If no parameter gets a gradient, the
        step does nothing and is not counted.

        After `first_step`, this is `second_step`; a closure, if there is one, is then the second pass.

        Args:
            closure: zeroes the gradients, computes the loss, calls `backward` and returns the loss. Called twice while
                a probe is active. May be omitted without a probe, if the gradients have been computed already.
            batch: what a refresh learns from when one is due: `(inputs, targets)`, a mapping, or a function that
                returns one of these. Not needed if the geometry has `batches` of its own.
            grad_scaler: a `torch.amp.GradScaler` whose scaled loss the closure differentiates; call its `update` after
                the step, as usual. `grad_scaler.step(opt, closure)` does the same.
        """
        check_closure(closure)
        scaler = self._scaler(grad_scaler, closure)
        if self._run.between:
            return self._second_step(scaler, closure)
        if self._weights.held:
            self.restore()  # a step was interrupted while it did so
        if closure is None and self._makes_state(batch):
            return self.base.step()
        if closure is None and self._probing:
            raise TypeError(
                "closure: a probe needs the loss twice; pass a closure, or use first_step() and second_step(); in "
                "Lightning, Hugging Face and Accelerate, see llqr.integrations"
            )
        self._learn(batch)
        if closure is None:
            self._update(scaler)
            return None
        amp.start_again(scaler, (self, self.base))
        self._notice_groups()
        random = RandomState(self._order()) if self._probing and self._same_dropout else None
        try:
            if self._probing:
                self._modules.mark()
            if self._probing and self._buffers_of_probe:
                self._find_modules()
                self._modules.hold_buffers()
            loss = self._first_pass(closure)
            if self._probing and self._has_gradients():
                try:
                    self._perturb(scaler)
                    self._second_pass(closure, random)
                finally:
                    self._return()
            self._update(scaler)
        except BaseException:
            self.restore()
            raise
        finally:
            self._modules.restore_buffers()  # those held for a second pass that did not take place
            self._modules.unmark()
            gradients.leave(self._order())
        return loss

    @never_compiled
    @torch.no_grad()
    def first_step(self, *, batch: Any = None, grad_scaler: Any = None, zero_grad: bool = True) -> None:
        """Move the weights to the probe, using the present gradients. Then run the second pass yourself.

        The present gradients are cleared, so that the second pass does not add to them. With `zero_grad=False` they
        stay, and clearing them is up to you.
        """
        if self._run.between:
            raise RuntimeError("first_step: called twice without second_step() or restore() between")
        if self._weights.held:
            self.restore()  # a step was interrupted while it did so
        self._learn(batch)
        self._find_modules()
        try:
            if self._probing and self._has_gradients():
                self._perturb(self._scaler(grad_scaler))
            if not self._buffers_of_probe:
                self._modules.hold_buffers()  # also before `start_after`: the loop runs its second pass regardless
            self._run.between = True
            self._others.hold(self._modules.trees.parameters(), self._order())
            if zero_grad:
                gradients.clear(self._order())
        except BaseException:
            self.restore()
            raise

    @never_compiled
    @torch.no_grad()
    def second_step(self, *, grad_scaler: Any = None, zero_grad: bool = False) -> None:
        """Restore the weights and descend with the gradients taken at the probe."""
        if not self._run.between and (self._probing or self.geometry is not None):
            raise RuntimeError("second_step: call first_step() first")
        self._second_step(self._scaler(grad_scaler))
        if zero_grad:
            self.zero_grad()

    def _second_step(self, scaler: Any, closure: Closure | None = None) -> Any:
        try:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            self._return()
            self._update(scaler)
            gradients.leave(self._order())
        except BaseException:
            self.restore()
            raise
        return loss

    def restore(self) -> None:
        """Abandon a step: weights and buffers go back to the centre, and the probe forgets it."""
        self._return()
        if self.probe is not None:
            self.probe.undo()

    def _return(self) -> None:
        """Weights and buffers go back to the centre, if they are not there already."""
        if self._weights.held:
            self._gather_again()
            self._weights.restore()
        self._modules.restore_buffers()
        self._run.between = False
        forget_derived_weights()
        self._others.restore()

    @property
    def _probing(self) -> bool:
        return self.probe is not None and self.probe.active(self.steps)

    def _makes_state(self, batch: Any) -> bool:
        """Whether this is how `torch.distributed.checkpoint` makes an optimizer's state: a step of no length."""
        if self.state or any(group.get("lr") != 0 for group in self.param_groups):
            return False
        return self._probing or self._lacks_batch(batch)

    def _scaler(self, given: Any, closure: Closure | None = None) -> Any:
        """The scaler of the loss: given, calling, or known only by what it has written on this optimizer."""
        scaler = self._run.scaler if given is None else given
        return amp.scaler_of(self, has_closure=closure is not None) if scaler is None else scaler

    def _learn(self, batch: Any) -> None:
        """Let the geometry begin, continue or finish a refresh, whatever is due at this step."""
        if self.geometry is None:
            return
        if self.geometry.due:
            self._claim()
        with torch.enable_grad():
            self.geometry.refresh_if_due(batch)

    def _claim(self) -> None:
        """Tell the geometry which parameters move; there may have come some."""
        claim = getattr(self.geometry, "claim", None)
        if claim is not None:
            claim(self._order())

    def _find_modules(self) -> None:
        self._notice_groups()
        if not self._modules.known:
            with self._modules.finding(self._order()):
                pass

    def _lacks_batch(self, batch: Any) -> bool:
        geometry = self.geometry
        return geometry is not None and geometry.due and batch is None and getattr(geometry, "batches", None) is None

    def _first_pass(self, closure: Closure) -> Any:
        with ExitStack() as contexts:
            losses: list[Any] = []
            if not self._modules.known and self.probe is not None:
                losses = contexts.enter_context(self._modules.finding(self._order()))
            if self._probing:
                contexts.enter_context(refuse_steps_in_backward())
            if self._probing and self._no_sync is not None:
                contexts.enter_context(self._no_sync())
            outside = gradients.clear_left(self._order())
            if outside and self.probe is not None:
                contexts.enter_context(OutsideGradients(outside))
            contexts.enter_context(torch.enable_grad())
            loss = closure()
            losses.append(loss)
        if self._probing:
            self._others.reached_by(loss)
        # A copy, because a captured closure writes the losses of both passes into the same memory.
        return pytree.tree_map_only(Tensor, lambda part: part.detach().clone(), loss)

    def _second_pass(self, closure: Closure, random: RandomState | None) -> None:
        """The closure again, with the same random numbers.

        `restore` undoes what it does to the model's buffers, unless they are to be the probe's.
        """
        if self._buffers_of_probe:
            self._modules.restore_buffers()
        else:
            self._modules.hold_buffers()
        self._others.hold(self._modules.trees.parameters(), self._order())
        gradients.clear(self._order())
        same_numbers = nullcontext() if random is None else repeated(random, self._order())
        with same_numbers, torch.enable_grad(), self._modules.rewound(keep=not self._buffers_of_probe):
            closure()

    def _perturb(self, scaler: Any) -> None:
        """`theta <- theta + eps`, after a copy of `theta` is taken."""
        assert self.probe is not None
        parameters, grads = self._parameters_and_grads()
        refuse_fsdp1(parameters)
        self._gather_again()
        sharding = Sharding.of(parameters)
        grads = amp.centre_gradients(scaler, (self, self.base), local(grads))
        self._weights.take(parameters)
        forget_derived_weights()  # otherwise the second pass might use those of the centre
        if amp.overflowed(scaler, grads, sharding):
            # The probe must not remember such gradients. NaN weights make the second pass overflow too, on every rank
            # of a distributed run, so that the scaler skips the step and reduces its scale.
            torch._foreach_mul_(local(parameters), float("nan"))
            return
        layers, biases = self._modules.trees.roles(parameters)
        point = Point(parameters, grads, layers, biases, own_radius(self.base, parameters), sharding)
        eps = self.probe.displacement(point, lambda v: self._transported(parameters, v), self.steps)
        point_uphill(self.base, parameters, eps)
        torch._foreach_add_(local(parameters), eps)

    def _gather_again(self) -> None:
        """Before and after the weights move: what FSDP2 has gathered of them must not be used any more."""
        if any_sharded(self._order()):
            drop_gathered(self._modules.trees.modules)

    def _update(self, scaler: Any) -> None:
        """`theta <- base(theta, U g~)`."""
        self._run.called = True
        if not self._has_gradients():
            self._do_nothing()
            return
        if scaler is not None:
            amp.unscale_once(scaler, self, self.base)
        geometry = self.geometry if self.transport else None
        parameters, grads = ([], []) if geometry is None else self._parameters_and_grads()
        Ug = [] if geometry is None else geometry.transport(parameters, grads)
        with gradients.substituted(Ug, grads, parameters):
            if scaler is not None:
                scaler.step(self.base)
            else:
                self.base.step()
        forget_derived_weights()
        if self.probe is not None:
            self.probe.settle()
        self.steps += 1
        if self.geometry is not None:
            self.geometry.advance()

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

    def _transported(self, parameters: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        """`U v` where `v` are this rank's parts of sharded tensors."""
        if self.geometry is None:
            return v
        sharded = [as_sharded(part, parameter) for part, parameter in zip(v, parameters, strict=True)]
        return local(self.geometry.transport(parameters, sharded))

    def _parameters_and_grads(self) -> tuple[list[Tensor], list[Tensor]]:
        return gradients.collected(self._order(), self._modules.trees.name)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.param_groups for p in group["params"])

    def __repr__(self) -> str:
        probe = None if self.probe is None else self.probe.name
        geometry = None if self.geometry is None else type(self.geometry).__name__
        return (
            f"{type(self).__name__}(probe={probe}, geometry={geometry}, transport={self.transport}, base={self.base})"
        )
