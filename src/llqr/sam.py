"""Algorithm 1 of the paper as one optimizer, and the methods by name.

Each method is a point of probe x metric x transport x base optimizer:

    refresh U if due                                     geometry
    g   = grad L(theta)                                  first pass
    eps = rho U g / sqrt(g.Ug)                           probe
    g~  = grad L(theta + eps)                            second pass
    theta <- base(theta, U g~)                           transport and base optimizer
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from llqr.checks import CLOSURE, check_base, check_closure, check_geometry, check_given, check_settings
from llqr.distributed.dtensors import local
from llqr.passes import Closure, Step, TwoCalls, own_radii
from llqr.probes import PROBES, ASAMProbe, FisherSAMProbe, FriendlySAMProbe, Point, SAMProbe
from llqr.schedule import at

if TYPE_CHECKING:
    from llqr.geometry import GeometryLike

Base = torch.optim.Optimizer
OWN_SETTINGS = ("geometry", "transport", "model", "no_sync", "same_dropout", "buffers", "measure", "max_norm")


class Optimizer(TwoCalls):
    """Any point of probe x metric x transport x base optimizer.

    Args:
        base: a constructed optimizer (SGD, AdamW, ...). Its `param_groups` and `state` *are* this optimizer's, so that
            schedulers may be built on either. It adds weight decay and momentum after the metric.
        probe: where SAM looks; None for plain descent.
        geometry: the learned metric `U`; None for the identity.
        transport: whether the update gradient goes through `U` (False is the paper's LLQR^Delta).
        model: only one pass writes its buffers (BatchNorm statistics). Default: the geometry's model; without either,
            both passes write to buffers, as in other implementations of SAM. FSDP2 needs it if gathered weights are
            kept after the backward pass.
        no_sync: `ddp_model.no_sync` makes the probe each rank's own (m-sharpness), in steps with a closure.
        same_dropout: both passes of a step draw the same numbers from torch's generators.
        buffers: which pass writes the model's buffers: "centre" the first, "probe" the second, from where they were
            before the step. In the two-call form, `first_step` comes after the first pass, so that with "probe" both
            passes write.
        measure: record each step in `last`: `loss`, `loss_at_probe` (its excess over `loss` indicates sharpness),
            `gradient_norm`, `displacement` (the length of `eps`), `passes`, `step`. Tensors stay on the device.
        max_norm: largest norm of the gradient that the base optimizer gets. With `measure=True`,
            `last["update_norm"]` is the norm before clipping.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> base, probe = torch.optim.SGD(model.parameters(), lr=0.1), SAMProbe(rho=0.05)
        >>> opt = Optimizer(base, probe, model=model, measure=True)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> float(opt.step(closure)) > 0, opt.last["passes"], round(float(opt.last["displacement"]), 6)
        (True, 2, 0.05)
    """

    # With this, torch's GradScaler passes itself to `step`, which must unscale between its two passes.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        base: Base,
        probe: SAMProbe | None = None,
        geometry: GeometryLike | None = None,
        *,
        transport: bool = True,
        model: nn.Module | None = None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
        same_dropout: bool = True,
        buffers: Literal["centre", "probe"] = "centre",
        measure: bool = False,
        max_norm: float | None = None,
    ) -> None:
        check_base(base)
        check_settings(probe, transport, model, no_sync, same_dropout, buffers, measure, max_norm)
        if geometry is not None:
            check_geometry(geometry, base, no_sync)
        super().__init__(base, probe, geometry, transport, model, no_sync, same_dropout, buffers, measure, max_norm)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, batch: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step; returns the loss at the centre.

        After `first_step`, this is `second_step`; a closure, if there is one, is then the second pass. If no parameter
        gets a gradient, the step does nothing and is not counted.

        Args:
            closure: zeroes the gradients, computes the loss, calls `backward` and returns the loss. Called twice while
                a probe is active; any other side effect happens twice. May be omitted without a probe, if the gradients
                have been computed already.
            batch: what a refresh learns from when one is due: `(inputs, targets)`, a mapping, or a function that
                returns one of these. Not needed if the geometry has `batches` of its own.
            grad_scaler: the `torch.amp.GradScaler` whose scaled loss the closure differentiates; call its `update`
                after the step, as usual. `grad_scaler.step(opt, closure)` does the same once it has scaled a loss.
        """
        check_closure(closure)
        if self._begun:
            return self._finish(closure, grad_scaler)
        if closure is None and self._makes_state:
            return self.base.step()
        if closure is None and self.probing:
            raise TypeError(CLOSURE)
        self._refresh(batch)
        with Step(self, closure, grad_scaler) as step:
            loss, g = step.centre()
            if step.probing and g.grads:
                g = step.at(self._displacement(g), g)
            self._descend(step, g)
        return loss

    @property
    def probing(self) -> bool:
        """Whether the next step takes a second pass, at the probe; see `rho`, `start_after` and `every` of the probe.

        Example:
            >>> opt = SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), rho=0.05, start_after=1000)
            >>> opt.probing
            False
        """
        if self.probe is None or not self.probe.active(self.steps):
            return False
        rho = at(self.probe.rho, self.steps, "rho", 0)
        return any(rho if own is None else own for _, own in own_radii(self.base))

    def _refresh(self, batch: Any) -> None:
        """Learn `U`, if it is time to."""
        if self.geometry is not None:
            with torch.enable_grad():
                self.geometry.refresh_if_due(batch)

    def _displacement(self, g: Point) -> list[Tensor]:
        """`eps = rho U g / sqrt(g.Ug)`."""
        assert self.probe is not None
        return self.probe.displacement(g, lambda v: self._U(g, v), self.steps)

    def _descend(self, step: Step, g: Point) -> None:
        """`theta <- base(theta, U g)`."""
        done = step.descend(g, self._U(g, g.grads) if self.transport else g.grads)
        if self.probe is not None:
            self.probe.settle() if done else self.probe.undo()
        if self.geometry is not None and done:
            self.geometry.advance()
        self.steps += done

    def _U(self, g: Point, v: list[Tensor]) -> list[Tensor]:
        """`U v`; `v` are this rank's parts of sharded tensors."""
        if self.geometry is None or not v:
            return v
        if g.sharding is None:
            return self.geometry.transport(g.parameters, v)
        return local(self.geometry.transport(g.parameters, g.sharding.joined(v)))


# -- the methods by name -----------------------------------------------------------------------------------------------


class WithProbe(Optimizer):
    """`Optimizer` with a probe of one kind, whose settings (`rho`, `norm`, ...) stand beside those of the optimizer."""

    kind: ClassVar[type[SAMProbe]]

    def __init__(self, base: Base, *rho: Any, **settings: Any) -> None:
        check_base(base)
        own = {key: settings.pop(key) for key in OWN_SETTINGS if key in settings}
        super().__init__(base, self.kind(*rho, **settings), **own)


class SAM(WithProbe):
    """`SAM(base, rho, norm="metric", start_after=0, every=1)`: `eps = rho g / |g|`.

    This and all methods take the settings of `Optimizer` too; with `geometry=` it is LLQR+SAM. `every=5` probes in one
    step of five, and the others take one pass.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> opt = SAM(torch.optim.SGD([weight], lr=0.1), rho=0.05)
    """

    kind = SAMProbe


class ASAM(WithProbe):
    """`ASAM(base, rho, eta=0.01)`: `T = |w| + eta` (1 for biases), `eps = rho T^2 g / |T g|`.

    With a geometry `eps = rho T U T g / |T g|_U`.

    Example:
        >>> opt = ASAM(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1), rho=0.5)
    """

    kind = ASAMProbe


class FisherSAM(WithProbe):
    """`FisherSAM(base, rho, eta=0.1)`: `eps = rho F^-1 g / sqrt(g.F^-1 g)` with `F^-1 = 1 / (g^2 + eta)`.

    Example:
        >>> opt = FisherSAM(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), rho=0.1)
    """

    kind = FisherSAMProbe


class FriendlySAM(WithProbe):
    """`FriendlySAM(base, rho, lam=0.9)`: the probe follows `g - gbar`, what is specific to this batch.

    Example:
        >>> opt = FriendlySAM(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), rho=0.1, lam=0.6)
    """

    kind = FriendlySAMProbe


class LLQRSAM(SAM):
    """`LLQRSAM(base, geometry, rho)`: `theta+ = theta + rho U g / sqrt(g.Ug)`, `theta <- theta - eta U g(theta+)`.

    Use SAM's radius as `rho`: the probe shrinks with `U`. With `norm="euclidean"`, as in the authors' public code, the
    probe `rho U g / |U g|` has the length `rho`: try half of SAM's radius. `transport=False` is the paper's
    LLQR^Delta+SAM: the metric shapes the probe and leaves the update alone.

    Example:
        >>> import llqr
        >>> model = torch.nn.Linear(4, 3)
        >>> geometry = llqr.Geometry(model, torch.nn.functional.cross_entropy, structure="e-kfac")
        >>> opt = LLQRSAM(torch.optim.SGD(model.parameters(), lr=0.1), geometry, rho=0.1)
    """

    def __init__(self, base: Base, geometry: GeometryLike, *rho: Any, **settings: Any) -> None:
        check_given(geometry)
        super().__init__(base, *rho, geometry=geometry, **settings)


class LLQR(Optimizer):
    """No probe: the base optimizer on `U g`.

    Example:
        >>> import llqr
        >>> model = torch.nn.Linear(4, 3)
        >>> geometry = llqr.Geometry(model, torch.nn.functional.cross_entropy)
        >>> opt = LLQR(torch.optim.SGD(model.parameters(), lr=0.1), geometry)
    """

    def __init__(self, base: Base, geometry: GeometryLike, **settings: Any) -> None:
        check_given(geometry)
        super().__init__(base, None, geometry, **settings)


BASES = ("sgdm", "adam", "adamw")


def method_names() -> list[str]:
    """Every name `build` knows. `llqr` may be written `llqr-ngd` or `llqr-newton`, as in the paper's tables.

    Example:
        >>> "llqr+fsam" in method_names()
        True
    """
    crossed = [f"llqr+{probe}" for probe in PROBES] + [f"llqr-probe-only+{probe}" for probe in PROBES]
    return [*BASES, *PROBES, "llqr", *crossed]


def build(name: str, base: Base, *, geometry: GeometryLike | None = None, **settings: Any) -> Optimizer:
    """A method by its name in the paper's tables, such as `sam`, `llqr-ngd+fsam` or `llqr-ngd-probe-only+sam`.

    `settings` are those of the probe (`rho`, `lam`, ...) and of `Optimizer` (`model`, `measure`, ...).

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> build("fsam", torch.optim.SGD([weight], lr=0.1), rho=0.1, lam=0.6).probe.name
        'fsam'
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected one of {', '.join(method_names())}, got {name!r}")
    learns = re.fullmatch("llqr-(ngd|newton)(.*)", name.lower())
    plain, divergence = (f"llqr{learns[2]}", learns[1]) if learns else (name.lower(), None)
    if plain not in method_names():
        raise ValueError(f"name: unknown method {name!r}; choose one of {', '.join(method_names())}")
    learned = plain.startswith("llqr")
    if learned and geometry is None:
        raise ValueError(f"geometry: {name!r} needs one, pass geometry=llqr.Geometry(model, loss_fn)")
    if not learned and geometry is not None:
        learning = "llqr" if plain in BASES else f"llqr+{plain}"
        raise ValueError(f"geometry: {name!r} has none; did you mean {learning!r}?")
    given = getattr(getattr(geometry, "divergence", None), "name", divergence)
    if divergence and given != divergence:
        raise ValueError(f"geometry: {name!r} wants the divergence {divergence!r}, got {given!r}")
    kind = plain.rpartition("+")[2]
    if kind not in PROBES:
        return Optimizer(base, None, geometry, **settings)
    of_optimizer = {key: settings.pop(key) for key in OWN_SETTINGS if key in settings}
    of_optimizer.setdefault("transport", "probe-only" not in plain)
    return Optimizer(base, PROBES[kind](**settings), geometry, **of_optimizer)
