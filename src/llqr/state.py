"""An optimizer around another one: groups and state are the inner one's, and what is saved holds both."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llqr.caller_warnings import warn
from llqr.checks import check_parameters, check_saved, check_state_dict
from llqr.distributed.dtensors import whole
from llqr.schedule import plain

if TYPE_CHECKING:
    from llqr.geometry import GeometryLike
    from llqr.passes import Step
    from llqr.probes import SAMProbe


@dataclass
class Run:
    """What changes from step to step.

    An object of its own, because Lightning and Fabric hand out copies of an optimizer that share its attributes.

    Attributes:
        begun: the step that has begun, while weights may be at the probe.
        called: whether there has been a step, in whichever form; schedulers ask for it.
        warned: whether a warning that is said once was shown.
        last: what the last step has measured, see `Optimizer`.
    """

    steps: int = 0
    begun: Step | None = None
    called: bool = False
    warned: bool = False
    last: dict[str, Any] | None = None


def _of(owner: str, name: str) -> property:
    """An attribute of another object, such as the base optimizer's own `state`."""

    def read(wrapper: Wrapper) -> Any:
        return getattr(getattr(wrapper, owner), name)

    def write(wrapper: Wrapper, value: Any) -> None:
        if hasattr(wrapper, owner):  # not while torch constructs
            setattr(getattr(wrapper, owner), name, value)

    return property(read, write)


class Wrapper(torch.optim.Optimizer):
    """Looks like its base optimizer to schedulers, frameworks and checkpoints."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        probe: SAMProbe | None,
        geometry: GeometryLike | None,
        transport: bool,
        model: nn.Module | None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None,
        same_dropout: bool,
        buffers: str,
        measure: bool,
        max_norm: float | None,
    ) -> None:
        super().__init__([{"params": [torch.zeros(0)]}], {})  # only for torch's hooks; the groups belong to the base
        self.base, self.probe, self.geometry, self.transport = base, probe, geometry, transport
        self.model = geometry.model if model is None and geometry is not None else model
        self._no_sync, self._same_dropout, self._buffers_of_probe = no_sync, same_dropout, buffers == "probe"
        self._run, self.measure, self.max_norm = Run(), measure, max_norm
        self._notice_parameters()

    if TYPE_CHECKING:
        steps: int
        last: dict[str, Any] | None
    else:
        # Groups and state are the base optimizer's own objects, also after `load_state_dict` has replaced them.
        param_groups, state, defaults = (_of("base", name) for name in ("param_groups", "state", "defaults"))
        steps, _opt_called, last = (_of("_run", name) for name in ("steps", "called", "last"))
        # So are the hooks of a state: it is the base that saves and loads.
        _optimizer_state_dict_pre_hooks = _of("base", "_optimizer_state_dict_pre_hooks")
        _optimizer_state_dict_post_hooks = _of("base", "_optimizer_state_dict_post_hooks")
        _optimizer_load_state_dict_pre_hooks = _of("base", "_optimizer_load_state_dict_pre_hooks")
        _optimizer_load_state_dict_post_hooks = _of("base", "_optimizer_load_state_dict_post_hooks")

        def __getattr__(self, name: str) -> Any:
            """What only the base has, such as `train` and `eval` of schedule-free optimizers."""
            if name.startswith("_") or name in ("base", "grad_scale", "found_inf"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.base, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "base"):  # not while torch constructs
            self.base.add_param_group(param_group)
            self._notice_parameters()

    def _notice_parameters(self) -> None:
        """Check the parameters and learn their names."""
        check_parameters(self._order(), self._no_sync)
        self._show_radius()
        named = [] if self.model is None else self.model.named_parameters()
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        for group in self.param_groups:
            self.names = dict(zip(group["params"], group.get("param_names", ()), strict=False)) | self.names

    def _show_radius(self) -> None:
        """Let groups without a radius of their own show the probe's, if it is a number."""
        shown = None if self.probe is None else plain(self.probe.rho)
        for group in () if "rho" in getattr(self.base, "defaults", ()) else self.param_groups:
            if not has_own_radius(group):
                for key in RADIUS:
                    group.pop(key, None) if shown is None else group.update({key: shown})

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def _order(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self, *, metric: bool = True) -> dict[str, Any]:
        """The base optimizer's state, with the metric, the probe's memory and the counters in the first group.

        They are there because `torch.distributed.checkpoint.state_dict` keeps only states and groups. Of a metric that
        is shared out among ranks, each rank has its own blocks. `metric=False` leaves the metric out, for a smaller
        file, which loads with `adopt=True`.
        """
        self._check_centre("state_dict")
        base = self.base.state_dict()
        own = self._own_state() | {"states": len(base["state"])} | ({} if metric else {"geometry": None})
        return with_own(base, own, self._order())

    def _own_state(self) -> dict[str, Any]:
        order, probe = self._order(), self.probe
        return {
            "steps": self.steps,
            "shapes": [list(parameter.shape) for parameter in order],
            "probe": probe and {"name": probe.name, "rho": plain(probe.rho)} | probe.state_dict(order),
            "geometry": None if self.geometry is None else self.geometry.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, adopt: bool = False) -> None:
        """Strict: refuses the state of another probe, another geometry or other parameters; then nothing has changed.

        With `adopt=True` it takes the state of another method (SAM, LLQR+SAM, the base optimizer alone): momenta and
        counters, and of probe and metric what both have; the rest starts fresh.
        """
        self._check_centre("load_state_dict")
        state, own = taken_apart(state_dict)
        ours = self._own_state()
        own = adopted(own, ours) if adopt else own
        check_saved(own, ours, len(state["state"]))
        assert own is not None
        before: dict[str, Any] = {"state": self.base.state, "param_groups": self.base.param_groups}  # replaced below
        self.base.load_state_dict(state)
        try:
            self._load_own(own)
        except BaseException:
            self.base.__setstate__(before)
            if self.probe is not None:
                self.probe.load_state_dict(ours["probe"], self._order())
            raise
        for group, mine in zip(self.param_groups, before["param_groups"] if adopt else (), strict=False):
            if has_own_radius(mine):
                group.setdefault("rho", mine["rho"])
        self._show_radius()
        saved, now = ((part["probe"] or {}).get("rho") for part in (own, ours))
        if saved is not None and now is not None and saved != now:
            warn(f"rho: saved with {saved:g}, this run goes on with its own, {now:g}")

    def _load_own(self, own: Mapping[str, Any]) -> None:
        steps = int(own["steps"])
        if self.probe is not None:
            self.probe.load_state_dict(own["probe"], self._order())
        if self.geometry is not None:
            self.geometry.load_state_dict(own["geometry"])
        self.steps = steps

    def make_state(self) -> None:
        """Let a fresh base make its state (momenta), by a step of length zero along gradients of zero.

        Only needed before `torch.distributed.checkpoint.load` loads into an existing `state_dict()`; the base may count
        the step. `get_optimizer_state_dict` does the same by itself.
        """
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        _init_optim_state(self)

    @property
    def _makes_state(self) -> bool:
        """Whether `torch.distributed.checkpoint` calls `step` to make the base's state: `lr` and gradients are 0."""
        still = not self.state and all(group.get("lr") == 0 for group in self.param_groups)
        return still and not any(whole(p.grad.any()) for p in self._order() if p.grad is not None)

    def _check_centre(self, what: str) -> None:
        if self._run.begun is not None and self._run.begun.away:
            raise RuntimeError(f"{what}: the weights are at the probe; call second_step() or restore() first")

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, without hooks; and without the `step` that a scheduler binds to this very object."""
        self._check_centre("copy")
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}


# -- the dictionary ----------------------------------------------------------------------------------------------------

#: What a group without a radius of its own shows, and what tells that it is the probe's. Neither is saved.
RADIUS = ("rho", "initial_rho")


def has_own_radius(group: Mapping[str, Any]) -> bool:
    return group.get("rho") is not None and group["rho"] != group.get("initial_rho")


def _without(group: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


class OwnState(str):
    """Our part of a state but for large tensors, as one value for `torch.distributed.checkpoint`.

    DCP loads a nested dictionary entry by entry, and only entries that already exist. It leaves strings alone, so that
    this is one. Pickled, it is the plain dictionary.
    """

    content: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> OwnState:
        own = cls("llqr")
        own.content = content
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.content.items()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnState:
        """Still one value: `async_save` stores a copy."""
        return OwnState.of(copy.deepcopy(self.content, memo))


def with_own(base: Mapping[str, Any], own: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The base optimizer's state and our own part, its large tensors under names that never change.

    A fresh optimizer has all of these tensors too: identities and zeros.
    """
    rest, tensors = dict(own), {}
    metric = (own["geometry"] or {}).get("metric")
    if isinstance(metric, Mapping) and isinstance(metric.get("factors"), Mapping):
        tensors["factors"] = dict(metric["factors"])
        rest["geometry"] = {**own["geometry"], "metric": _without(metric, "factors")}
    mean = (own["probe"] or {}).get("mean")
    if mean is not None:
        zeros = {str(i): torch.zeros_like(p) for i, p in enumerate(parameters) if i not in mean}
        tensors["mean"] = {str(i): tensor for i, tensor in mean.items()} | zeros
        rest["probe"] = {**own["probe"], "mean": list(mean)}
    groups = [_without(g, *RADIUS[has_own_radius(g) :]) for g in base["param_groups"]]
    first = next(group for group in groups if group["params"])  # DCP drops the empty ones
    first.update(llqr=OwnState.of(rest), llqr_tensors=tensors)
    return {**base, "param_groups": groups}


def taken_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The base optimizer's part of a state, and our own, if it has one."""
    own, base = None, dict(state)
    check_state_dict(base)
    groups = [dict(group) for group in base["param_groups"]]
    for group in groups:
        found, tensors = group.pop("llqr", None), group.pop("llqr_tensors", {})
        if found is not None:
            own = _joined(found.content if isinstance(found, OwnState) else found, tensors)
    return base | {"param_groups": groups}, own


def adopted(own: Mapping[str, Any] | None, ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our part of another method's state: probe and geometry where both have the same, otherwise those of `ours`."""
    own = {**ours, "steps": 0} if own is None else own
    same = own["probe"] and ours["probe"] and own["probe"]["name"] == ours["probe"]["name"]
    both = own["geometry"] is not None and ours["geometry"] is not None
    return {**own, "probe": (own if same else ours)["probe"], "geometry": (own if both else ours)["geometry"]}


def _joined(rest: Mapping[str, Any], tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our part with its large tensors."""
    own = dict(rest)
    if "factors" in tensors:
        metric = {**own["geometry"]["metric"], "factors": tensors["factors"]}
        own["geometry"] = {**own["geometry"], "metric": metric}
    if "mean" in tensors:
        own["probe"] = {**own["probe"], "mean": {i: tensors["mean"][str(i)] for i in own["probe"]["mean"]}}
    return own
