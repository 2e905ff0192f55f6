"""An optimizer around another one: groups and state are the inner one's, and what is saved holds both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llqr.step import saved_state

if TYPE_CHECKING:
    from llqr.geometry import GeometryLike
    from llqr.probes import SAMProbe


@dataclass
class StepState:
    """What changes from step to step.

    An object of its own: frameworks hand out imitations of an optimizer, which look up what they lack in the original
    but would keep for themselves what is assigned to them.

    Attributes:
        parameters: those of the groups, when they were last looked at.
        between: whether `first_step` has been called, and `second_step` not yet.
        scaler: the `GradScaler` that is calling `step`.
        called: whether there has been a step, whichever way it was called; schedulers ask for it.
        warned: whether it has been said that a step had no gradients.
    """

    steps: int = 0
    parameters: list[Tensor] = field(default_factory=list)
    between: bool = False
    scaler: Any = None
    called: bool = False
    warned: bool = False


def _of(owner: str, name: str) -> property:
    """An attribute that is one of this owner, such as the base optimizer's own object."""

    def read(wrapper: Wrapper) -> Any:
        return getattr(getattr(wrapper, owner), name)

    def write(wrapper: Wrapper, value: Any) -> None:
        if hasattr(wrapper, owner):
            setattr(getattr(wrapper, owner), name, value)

    return property(read, write)


class Wrapper(torch.optim.Optimizer):
    """Looks like its base optimizer to schedulers, frameworks and checkpoints."""

    def __init__(self, base: torch.optim.Optimizer, probe: SAMProbe | None, geometry: GeometryLike | None) -> None:
        super().__init__([{"params": [torch.zeros(0)]}], {})  # only for torch's hooks; the groups belong to the base
        self.base = base
        self.probe = probe
        self.geometry = geometry
        self._run = StepState()

    # -- groups and state are the base optimizer's own objects, even after it replaces them (load_state_dict does) ----
    # `base` may be missing (while torch constructs) or be looked up by an imitation of this class that delegates.

    if not TYPE_CHECKING:
        param_groups, state, defaults = (_of("base", name) for name in ("param_groups", "state", "defaults"))
        _opt_called = _of("_run", "called")

    @property
    def steps(self) -> int:
        """Optimizer steps done, which schedules are functions of."""
        return self._run.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._run.steps = steps

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What only the base has, such as `train` and `eval` of schedule-free optimizers."""
            if name.startswith("_") or name in ("base", "grad_scale", "found_inf"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.base, name)

    @contextmanager
    def _called_by(self, scaler: Any) -> Iterator[None]:
        """While entered, `step` is called by this scaler."""
        self._run.scaler = scaler
        try:
            yield
        finally:
            self._run.scaler = None

    def _order(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, with the metric, the probe's memory and the counters under `"llqr"`.

        They stand in the first group too: `torch.distributed.checkpoint.state_dict` keeps only states and groups. Of a
        metric that is shared out among ranks, each rank has its own blocks.
        """
        self._check_centre("state_dict")
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        base = self.base.state_dict()
        own = {
            "steps": self.steps,
            "shapes": self._shapes(),
            "states": len(base["state"]),
            "probe": None if self.probe is None else {"name": self.probe.name} | self.probe.state_dict(self._order()),
            "geometry": None if self.geometry is None else self.geometry.state_dict(),
        }
        state: dict[str, Any] = saved_state.with_own(base, own, self._order())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, adopt: bool = False) -> None:
        """Strict: refuses the state of another probe, another geometry or other parameters; then nothing has changed.

        Args:
            adopt: also take the state of a plain base optimizer, saved before it was wrapped: its momenta and groups.
                Probe, geometry and counters stay as they are.
        """
        self._check_centre("load_state_dict")
        state = state_dict if isinstance(state_dict, saved_state.State) else dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state)
            state = state if replaced is None else replaced
        state, own = saved_state.taken_apart(state)
        if own is None and not adopt:
            raise ValueError(
                "state_dict: no 'llqr' entry, so it was not saved by this optimizer; pass adopt=True to take the state "
                "of a plain base optimizer"
            )
        if own is not None:
            saved_state.check_probe(own["probe"], None if self.probe is None else self.probe.name)
            saved_state.check_geometry(own["geometry"], expected=self.geometry is not None)
            saved_state.check_shapes(own["shapes"], self._shapes())
            saved_state.check_base(own.get("states", 0), len(state["state"]))
        saved_state.check_groups(state["param_groups"], self.param_groups)
        before = {"state": self.base.state, "param_groups": self.base.param_groups}  # which loading replaces
        self.base.load_state_dict(state)
        try:
            if own is not None:
                self._load_own(own)
        except BaseException:
            self.base.__setstate__(before)
            raise
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def make_state(self) -> None:
        """Let a fresh base make its state (momenta), by a step of no length along gradients of zero.

        Only for what loads into an existing `state_dict()`, as `torch.distributed.checkpoint.load` does: the base may
        count the step. `get_optimizer_state_dict` does the same by itself.
        """
        if self.state:
            return
        before = [(parameter, parameter.grad) for parameter in self._order()]
        rates = [(group, group["lr"]) for group in self.param_groups if "lr" in group]
        try:
            for parameter, _ in before:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            for group, lr in rates:
                group["lr"] = torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0
            self.base.step()
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            for group, lr in rates:
                group["lr"] = lr

    def _load_own(self, own: Mapping[str, Any]) -> None:
        steps = int(own["steps"])
        memory = None if self.probe is None else self.probe.state_dict(self._order())
        if self.probe is not None:
            self.probe.load_state_dict(own["probe"], self._order())
        try:
            if self.geometry is not None:
                self.geometry.load_state_dict(own["geometry"])
        except BaseException:
            if self.probe is not None and memory is not None:
                self.probe.load_state_dict(memory, self._order())
            raise
        self.steps = steps

    def _check_centre(self, what: str) -> None:
        if self._run.between:
            raise RuntimeError(f"{what}: the weights are at the probe; call second_step() or restore() first")

    def _shapes(self) -> list[list[int]]:
        return [list(parameter.shape) for parameter in self._order()]

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, without hooks; and without the `step` that a scheduler binds to this very object."""
        self._check_centre("copy")
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
