"""The one wrapper: refresh if due, centre gradient, probe, gradient at the probe, transport by `U`, base step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from llqr.geometry import GeometryLike
from llqr.probes import Point, SAMProbe
from llqr.step import amp, gradients, saved_state
from llqr.step.modules import OwningModules
from llqr.step.random_state import RandomState
from llqr.step.snapshot import Snapshot

Closure = Callable[[], Any]


class Settings(TypedDict, total=False):
    """Keyword arguments every named method passes on to `Optimizer`."""

    model: nn.Module | None
    no_sync: Callable[[], AbstractContextManager[Any]] | None
    same_dropout: bool
    buffers: Literal["centre", "probe"]


class Optimizer(torch.optim.Optimizer):
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
        same_dropout: both passes of a step see the same random numbers.
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
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"base: expected a torch.optim.Optimizer, got {type(base).__name__}")
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError("base: LBFGS calls the closure by itself and cannot be wrapped")
        if geometry is not None and not hasattr(geometry, "transport"):
            raise TypeError(f"geometry: expected a llqr.Geometry, got {type(geometry).__name__}")
        if buffers not in ("centre", "probe"):
            raise ValueError(f"buffers: expected 'centre' or 'probe', got {buffers!r}")
        super().__init__([{"params": [torch.zeros(0)]}], {})  # only for torch's hooks; the groups belong to the base
        self.base = base
        self.probe = probe
        self.geometry = geometry
        self.transport = transport
        self.steps = 0
        self._no_sync = no_sync
        self._same_dropout = same_dropout
        self._buffers_of_probe = buffers == "probe"
        if model is None and geometry is not None:
            model = geometry.model
        self._modules = OwningModules(model)
        self._weights = Snapshot()  # frees its memory: a refresh and the base's step have their own peaks
        self.defaults = base.defaults

    # -- groups and state are the base optimizer's own objects, even after it replaces them (load_state_dict does) ----

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups if "base" in self.__dict__ else []

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if "base" in self.__dict__:
            self.base.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> Any:
        return self.base.state if "base" in self.__dict__ else {}

    @state.setter
    def state(self, state: Any) -> None:
        if "base" in self.__dict__:
            self.base.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "base" in self.__dict__:
            self.base.add_param_group(param_group)
            self._modules.known = self._modules.given

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, batch: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step; returns the loss at the centre.

        Args:
            closure: zeroes the gradients, computes the loss, calls `backward` and returns the loss. Called twice while
                a probe is active. May be omitted without a probe, if the gradients have been computed already.
            batch: what a refresh learns from when one is due: `(inputs, targets)`, a mapping, or a function that
                returns one of these.
            grad_scaler: a `torch.amp.GradScaler` whose scaled loss the closure differentiates; call its `update` after
                the step, as usual. (`grad_scaler.step(opt, closure)` does the same, but torch refuses it until the
                scaler has scaled a loss for the first time.)
        """
        if self._weights.held:
            raise RuntimeError("step: the weights are still at the probe; call second_step() or restore() first")
        if closure is None and self._probing:
            raise TypeError("closure: a probe needs the loss twice; pass a closure, or use first_step/second_step")
        self._learn(batch)
        if closure is None:
            self._update(grad_scaler)
            return None
        random = RandomState(self._order()) if self._probing and self._same_dropout else None
        if self._probing and self._buffers_of_probe:
            self._find_modules()
            self._modules.hold_buffers()
        loss = self._first_pass(closure)
        if self._probing:
            try:
                self._perturb(grad_scaler)
                self._second_pass(closure, random)
            finally:
                self.restore()
        self._update(grad_scaler)
        return loss

    @torch.no_grad()
    def first_step(self, *, batch: Any = None, grad_scaler: Any = None, zero_grad: bool = False) -> None:
        """Move the weights to the probe, using the present gradients. Then run the second pass yourself."""
        if self._weights.held:
            raise RuntimeError("first_step: called twice without second_step() or restore() between")
        self._learn(batch)
        self._find_modules()
        try:
            if self._probing:
                self._perturb(grad_scaler)
            if not self._buffers_of_probe:
                self._modules.hold_buffers()  # also before `start_after`: the loop runs its second pass regardless
        except BaseException:
            self.restore()
            raise
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, *, grad_scaler: Any = None, zero_grad: bool = False) -> None:
        """Restore the weights and descend with the gradients taken at the probe."""
        if self._probing and not self._weights.held:
            raise RuntimeError("second_step: call first_step() first")
        self.restore()
        self._update(grad_scaler)
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Put weights and buffers back to the centre, if they are not there already."""
        self._weights.restore()
        self._modules.restore_buffers()
        torch.clear_autocast_cache()

    @property
    def _probing(self) -> bool:
        return self.probe is not None and self.probe.active(self.steps)

    def _learn(self, batch: Any) -> None:
        """Let the geometry begin, continue or finish a refresh, whatever is due at this step."""
        if self.geometry is None:
            return
        if batch is None and self.geometry.due:
            raise ValueError(
                f"batch: a refresh is due at step {self.steps}; pass step(closure, batch=(inputs, targets))"
            )
        with torch.enable_grad():
            self.geometry.keep_up(batch)

    def _find_modules(self) -> None:
        if not self._modules.known:
            with self._modules.finding(self._order()):
                pass

    def _first_pass(self, closure: Closure) -> Any:
        with ExitStack() as contexts:
            if not self._modules.known and self.probe is not None:
                contexts.enter_context(self._modules.finding(self._order()))
            if self._probing and self._no_sync is not None:
                contexts.enter_context(self._no_sync())
            contexts.enter_context(torch.enable_grad())
            gradients.clear(self._order())
            loss = closure()
        # A copy, because a captured closure writes the losses of both passes into the same memory.
        return loss.detach().clone() if isinstance(loss, Tensor) else loss

    def _second_pass(self, closure: Closure, random: RandomState | None) -> None:
        """The closure again, with the same random numbers.

        `restore` undoes what it does to the model's buffers, unless they are to be the probe's.
        """
        if self._buffers_of_probe:
            self._modules.restore_buffers()
        else:
            self._modules.hold_buffers()
        if random is not None:
            random.restore()
        gradients.clear(self._order())
        with torch.enable_grad():
            closure()

    def _perturb(self, grad_scaler: Any) -> None:
        """`theta <- theta + eps`, after a copy of `theta` is taken."""
        assert self.probe is not None
        parameters, grads = self._parameters_and_grads()
        if not parameters:
            raise RuntimeError(
                "closure: no parameter of the optimizer got a gradient; does the closure call backward()?"
            )
        grads = amp.centre_gradients(grad_scaler, (self, self.base), grads)
        self._weights.take(parameters)
        # Otherwise, under a caller's autocast, the second pass would use low-precision copies of the old weights.
        torch.clear_autocast_cache()
        if amp.overflowed(grad_scaler, grads):
            # The probe must not remember such gradients. NaN weights make the second pass overflow too, on every rank
            # of a distributed run, so that the scaler skips the step and reduces its scale.
            torch._foreach_mul_(parameters, float("nan"))
            return
        layers, biases = self._modules.roles(parameters)
        point = Point(parameters, grads, layers, biases, self._own_radius(parameters))
        eps = self.probe.displacement(point, lambda v: self._transported(parameters, v), self.steps)
        torch._foreach_add_(parameters, eps)

    def _own_radius(self, parameters: list[Tensor]) -> list[float | None]:
        """The `"rho"` of each parameter's group, unless `rho` is a setting of the base optimizer (as in Adadelta)."""
        if "rho" in self.base.defaults or not any("rho" in group for group in self.param_groups):
            return [None] * len(parameters)
        radius = {p: group.get("rho") for group in self.param_groups for p in group["params"]}
        return [radius[p] for p in parameters]

    def _update(self, grad_scaler: Any) -> None:
        """`theta <- base(theta, U g~)`."""
        if grad_scaler is not None:
            amp.unscale_once(grad_scaler, self, self.base)
        transports = self.geometry is not None and self.transport
        parameters, grads = self._parameters_and_grads() if transports else ([], [])
        with gradients.substituted(self._transported(parameters, grads), grads, parameters):
            if grad_scaler is not None:
                grad_scaler.step(self.base)
            else:
                self.base.step()
        torch.clear_autocast_cache()
        self.steps += 1
        if self.geometry is not None:
            self.geometry.advance()

    def _transported(self, parameters: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        """`U v`."""
        return v if self.geometry is None else self.geometry.transport(parameters, v)

    def _parameters_and_grads(self) -> tuple[list[Tensor], list[Tensor]]:
        return gradients.collected(self._order(), self._modules.name)

    def _order(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, with the metric, the probe's memory and the counters under `"llqr"`."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = self.base.state_dict()
        state["llqr"] = {
            "steps": self.steps,
            "shapes": self._shapes(),
            "probe": None if self.probe is None else {"name": self.probe.name} | self.probe.state_dict(self._order()),
            "geometry": None if self.geometry is None else self.geometry.state_dict(),
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Strict: refuses the state of another probe, another geometry or other parameters."""
        state = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state)
            state = state if replaced is None else dict(replaced)
        if "llqr" not in state:
            raise ValueError("state_dict: no 'llqr' entry, so it was not saved by this optimizer; load it into `base`")
        own = state.pop("llqr")
        saved_state.check_probe(own["probe"], None if self.probe is None else self.probe.name)
        saved_state.check_geometry(own["geometry"], expected=self.geometry is not None)
        saved_state.check_shapes(own["shapes"], self._shapes())
        saved_state.check_groups(state["param_groups"], self.param_groups)
        # The geometry first: if it refuses its part, nothing else must have been loaded.
        if self.geometry is not None:
            self.geometry.load_state_dict(own["geometry"])
        if self.probe is not None:
            self.probe.load_state_dict(own["probe"], self._order())
        self.base.load_state_dict(state)
        self.steps = int(own["steps"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _shapes(self) -> list[list[int]]:
        return [list(parameter.shape) for parameter in self._order()]

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, without hooks; and without the `step` that a scheduler binds to this very object."""
        stays = ("step", "_opt_called")
        return {k: v for k, v in self.__dict__.items() if k not in stays and not k.startswith("_optimizer_")}

    def __repr__(self) -> str:
        probe = None if self.probe is None else self.probe.name
        geometry = None if self.geometry is None else type(self.geometry).__name__
        return (
            f"{type(self).__name__}(probe={probe}, geometry={geometry}, transport={self.transport}, base={self.base})"
        )
