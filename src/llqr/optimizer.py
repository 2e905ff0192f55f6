"""The one wrapper: refresh if due, centre gradient, probe, gradient at the probe, transport by `U`, base step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor, nn

from llqr.geometry import GeometryLike
from llqr.probes import Point, SAMProbe
from llqr.step import amp
from llqr.step.gradients import standing_in
from llqr.step.modules import Surroundings
from llqr.step.snapshot import Snapshot

Closure = Callable[[], Any]


class Settings(TypedDict, total=False):
    """Keyword arguments every named method passes on to `Optimizer`."""

    model: nn.Module | None
    no_sync: Callable[[], AbstractContextManager[Any]] | None
    same_dropout: bool


class Optimizer(torch.optim.Optimizer):
    """Any point of probe x metric x transport x base optimizer.

    Args:
        base: a constructed optimizer (SGD, AdamW, ...). Its `param_groups` and `state` *are* this optimizer's, so that
            schedulers may be built on either. Weight decay and momentum are its business, after the metric.
        probe: where SAM looks; None for plain descent.
        geometry: the learned metric `U`; None for the identity.
        transport: whether the update gradient goes through `U` (False is the paper's LLQR^Delta).
        model: protects the model's buffers (BatchNorm statistics) during the second pass. By default found at the
            first step: the modules that own the parameters, and others whose buffers the first pass writes to.
        no_sync: `ddp_model.no_sync` makes the probe each rank's own (m-sharpness).
        same_dropout: both passes of a step see the same random numbers.

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

    # torch's GradScaler then hands itself to `step`, which must unscale between its two passes.
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
    ) -> None:
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"base: expected a torch.optim.Optimizer, got {type(base).__name__}")
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError("base: LBFGS calls the closure by itself and cannot be wrapped")
        if geometry is not None and not hasattr(geometry, "transport"):
            raise TypeError(f"geometry: expected a llqr.Geometry, got {type(geometry).__name__}")
        super().__init__([{"params": [torch.zeros(0)]}], {})  # only for torch's hooks; the groups are the base's
        self.base = base
        self.probe = probe
        self.geometry = geometry
        self.transport = transport
        self.steps = 0
        self._no_sync = no_sync
        self._same_dropout = same_dropout
        if model is None and geometry is not None:
            model = geometry.model
        self._surroundings = Surroundings(model)
        self._weights = Snapshot()  # gives its memory back: a refresh and the base's step have peaks of their own
        self.defaults = base.defaults

    # -- the base optimizer's objects are ours, also after it replaces them (as load_state_dict does) -----------------

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
            self._surroundings.known = self._surroundings.given

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, batch: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step; returns the loss at the centre.

        Args:
            closure: zeroes the gradients, computes the loss, calls `backward` and returns the loss. Called twice while
                a probe is active. May be left out without a probe, when gradients are there already.
            batch: what a refresh learns from when one is due: `(inputs, targets)`, a mapping, or a function that
                returns one of these.
            grad_scaler: a `torch.amp.GradScaler` whose scaled loss the closure differentiates; call its `update` after
                the step, as always. (`grad_scaler.step(opt, closure)` does the same, but torch refuses it until the
                scaler has scaled something for the first time.)
        """
        if self._weights.held:
            raise RuntimeError("step: the weights still stand at the probe; call second_step() or restore() first")
        if closure is None and self._probing:
            raise TypeError("closure: a probe needs the loss twice; pass a closure, or use first_step/second_step")
        self._learn(batch)
        if closure is None:
            self._update(grad_scaler)
            return None
        random = self._random_state() if self._probing and self._same_dropout else None
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
        """Move the weights to the probe, from gradients that are there already. Then run the second pass yourself."""
        if self._weights.held:
            raise RuntimeError("first_step: called twice without second_step() or restore() between")
        self._learn(batch)
        if not self._surroundings.known:
            with self._surroundings.finding(self._order()):
                pass
        try:
            if self._probing:
                self._perturb(grad_scaler)
            self._surroundings.hold_buffers()  # in a warm-up too: such a loop runs its second pass regardless
        except BaseException:
            self.restore()
            raise
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, *, grad_scaler: Any = None, zero_grad: bool = False) -> None:
        """Put the weights back and descend with the gradients taken at the probe."""
        if self._probing and not self._weights.held:
            raise RuntimeError("second_step: call first_step() first")
        self.restore()
        self._update(grad_scaler)
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Put weights and buffers back where the centre was; does nothing when they are there."""
        self._weights.restore()
        self._surroundings.restore_buffers()
        torch.clear_autocast_cache()

    @property
    def _probing(self) -> bool:
        return self.probe is not None and self.probe.active(self.steps)

    def _learn(self, batch: Any) -> None:
        """Let the geometry begin, go on with or finish a refresh, whatever it owes this step."""
        if self.geometry is None:
            return
        if batch is None and self.geometry.due:
            raise ValueError(
                f"batch: a refresh is due at step {self.steps}; pass step(closure, batch=(inputs, targets))"
            )
        with torch.enable_grad():
            self.geometry.keep_up(batch)

    def _first_pass(self, closure: Closure) -> Any:
        with ExitStack() as contexts:
            if not self._surroundings.known and self.probe is not None:
                contexts.enter_context(self._surroundings.finding(self._order()))
            if self._probing and self._no_sync is not None:
                contexts.enter_context(self._no_sync())
            contexts.enter_context(torch.enable_grad())
            self._forget_gradients()
            loss = closure()
        # A copy: a captured closure writes both passes' losses into the same memory.
        return loss.detach().clone() if isinstance(loss, Tensor) else loss

    def _second_pass(self, closure: Closure, random: list[tuple[torch.device, Tensor]] | None) -> None:
        """The closure again, with the same random numbers; `restore` removes its trace in the model's buffers."""
        self._surroundings.hold_buffers()
        for device, state in random or []:
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        self._forget_gradients()
        with torch.enable_grad():
            closure()

    def _perturb(self, grad_scaler: Any) -> None:
        """`theta <- theta + eps`, after keeping a copy of `theta`."""
        assert self.probe is not None
        parameters, grads = self._gradients()
        if not parameters:
            raise RuntimeError(
                "closure: no parameter of the optimizer got a gradient; does the closure call backward()?"
            )
        grads = amp.centre_gradients(grad_scaler, (self, self.base), grads)
        self._weights.take(parameters)
        # Under a caller's autocast the second pass would otherwise run on low-precision copies of the centre's weights.
        torch.clear_autocast_cache()
        if amp.overflowed(grad_scaler, grads):
            # The probe must not remember such gradients. NaN weights make the second pass overflow too, on every rank
            # of a distributed run, and then the scaler skips the step and shrinks its scale.
            torch._foreach_mul_(parameters, float("nan"))
            return
        layers, biases = self._surroundings.roles(parameters)
        point = Point(parameters, grads, layers, biases, self._own_radius(parameters))
        eps = self.probe.displacement(point, lambda v: self._transported(parameters, v), self.steps)
        torch._foreach_add_(parameters, eps)

    def _own_radius(self, parameters: list[Tensor]) -> list[float | None]:
        """The `"rho"` of every parameter's group, unless that is a setting of the base optimizer (Adadelta has one)."""
        if "rho" in self.base.defaults or not any("rho" in group for group in self.param_groups):
            return [None] * len(parameters)
        radius = {p: group.get("rho") for group in self.param_groups for p in group["params"]}
        return [radius[p] for p in parameters]

    def _update(self, grad_scaler: Any) -> None:
        """`theta <- base(theta, U g~)`."""
        if grad_scaler is not None:
            amp.unscale_once(grad_scaler, self, self.base)
        parameters, grads = self._gradients() if self.geometry is not None and self.transport else ([], [])
        with standing_in(self._transported(parameters, grads), grads, parameters):
            if grad_scaler is not None:
                grad_scaler.step(self.base)
            else:
                self.base.step()
        torch.clear_autocast_cache()
        self.steps += 1
        if self.geometry is not None:
            self.geometry.advance()

    def _transported(self, parameters: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        return v if self.geometry is None else self.geometry.transport(parameters, v)

    def _forget_gradients(self) -> None:
        """So that a closure that forgets to zero them is still right.

        On a CUDA device in place: a captured closure cannot zero them, and writes to their memory wherever they are.
        """
        kept = []
        for parameter in self._order():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_cuda and gradient.layout == torch.strided:
                kept.append(gradient)
            else:
                parameter.grad = None
        if kept:
            torch._foreach_zero_(kept)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have a gradient, and the gradients beside them."""
        order = self._order()
        grads = [gradient for parameter in order if (gradient := parameter.grad) is not None]
        parameters = order if len(grads) == len(order) else [p for p in order if p.grad is not None]
        kinds = {(gradient.layout, gradient.dtype) for gradient in grads}
        if any(layout != torch.strided or dtype.is_complex for layout, dtype in kinds):
            self._refuse_gradients()
        return parameters, grads

    def _refuse_gradients(self) -> NoReturn:
        """Say which parameter's gradient is of a kind that is not supported."""
        for i, parameter in enumerate(self._order()):
            gradient = parameter.grad
            if gradient is not None and (gradient.layout != torch.strided or gradient.is_complex()):
                kind = "complex" if gradient.is_complex() else "sparse"
                who = self._surroundings.name(parameter) or f"number {i}"
                raise TypeError(f"parameters: {who!r} has a {kind} gradient, which is not supported")
        raise AssertionError("called without such a gradient")

    def _random_state(self) -> list[tuple[torch.device, Tensor]]:
        devices = {parameter.device for parameter in self._order() if parameter.is_cuda}
        states = [(torch.device("cpu"), torch.get_rng_state())]
        return states + [(device, torch.cuda.get_rng_state(device)) for device in devices]

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and under `"llqr"` the metric, the probe's memory and the counters."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = self.base.state_dict()
        state["llqr"] = {
            "steps": self.steps,
            "shapes": [list(parameter.shape) for parameter in self._order()],
            "probe": None if self.probe is None else {"name": self.probe.name} | self.probe.state_dict(self._order()),
            "geometry": None if self.geometry is None else self.geometry.state_dict(),
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Strict: refuses a state of another probe, another geometry or other parameters."""
        state = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state)
            state = state if replaced is None else dict(replaced)
        if "llqr" not in state:
            raise ValueError("state_dict: no 'llqr' entry, so it was not saved by this optimizer; load it into `base`")
        own = state.pop("llqr")
        self._check_state(own)
        self._check_groups(state["param_groups"])
        # The geometry first: what it refuses must not leave the rest half loaded.
        if self.geometry is not None:
            self.geometry.load_state_dict(own["geometry"])
        if self.probe is not None:
            self.probe.load_state_dict(own["probe"], self._order())
        self.base.load_state_dict(state)
        self.steps = int(own["steps"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _check_state(self, own: Mapping[str, Any]) -> None:
        saved = None if own["probe"] is None else own["probe"]["name"]
        mine = None if self.probe is None else self.probe.name
        if saved != mine:
            raise ValueError(f"state_dict: saved with the probe {saved!r}, this optimizer has {mine!r}")
        if (own["geometry"] is None) != (self.geometry is None):
            raise ValueError("state_dict: one of the saved and this optimizer has a geometry, the other has none")
        shapes = [list(parameter.shape) for parameter in self._order()]
        if len(own["shapes"]) != len(shapes):
            raise ValueError(f"state_dict: saved for {len(own['shapes'])} parameters, this optimizer has {len(shapes)}")
        for i, (theirs, ours) in enumerate(zip(own["shapes"], shapes, strict=True)):
            if list(theirs) != ours:
                raise ValueError(f"state_dict: parameter {i} was saved with shape {list(theirs)}, here it is {ours}")

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        """The same sizes and, where both were built from `named_parameters`, the same names in the same order."""
        sizes = [[len(group["params"]) for group in some] for some in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"state_dict: saved groups of {sizes[0]} parameters, this optimizer has {sizes[1]}")
        saved = [name for group in groups for name in group.get("param_names", ())]
        mine = [name for group in self.param_groups for name in group.get("param_names", ())]
        for theirs, ours in zip(saved, mine, strict=False):
            if theirs != ours:
                raise ValueError(f"state_dict: saved parameter {theirs!r} stands where this optimizer has {ours!r}")

    def _order(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, hooks stay behind, and so does the `step` that a scheduler ties to this very object."""
        stays = ("step", "_opt_called")
        return {k: v for k, v in self.__dict__.items() if k not in stays and not k.startswith("_optimizer_")}

    def __repr__(self) -> str:
        probe = None if self.probe is None else self.probe.name
        geometry = None if self.geometry is None else type(self.geometry).__name__
        return (
            f"{type(self).__name__}(probe={probe}, geometry={geometry}, transport={self.transport}, base={self.base})"
        )
