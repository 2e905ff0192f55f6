"""The methods by name: each is `Optimizer` with a probe, a geometry, or both."""

from typing import Any, Unpack

import torch

from llqr.checks import Settings
from llqr.geometry import Geometry, GeometryLike
from llqr.optimizer import Optimizer
from llqr.probes import PROBES, ASAMProbe, FisherSAMProbe, FriendlySAMProbe, SAMProbe
from llqr.probes.norms import Norm
from llqr.schedule import Schedule

Base = torch.optim.Optimizer


class MethodSettings(Settings, total=False):
    """Keyword arguments of every method with a probe: those of `Optimizer`, see there."""

    geometry: GeometryLike | None
    transport: bool


class SAM(Optimizer):
    """`eps = rho g / |g|`; with `geometry=` it is LLQR+SAM, `eps = rho U g / |U g|`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> opt = SAM(torch.optim.SGD([weight], lr=0.1), rho=0.05)
    """

    def __init__(
        self,
        base: Base,
        rho: Schedule = 0.05,
        *,
        norm: Norm = "euclidean",
        start_after: int = 0,
        **settings: Unpack[MethodSettings],
    ) -> None:
        super().__init__(base, SAMProbe(rho, norm=norm, start_after=start_after), **settings)


class LLQRSAM(SAM):
    """LLQR+SAM: `theta+ = theta + rho U g / |U g|`, then `theta <- theta - eta U g(theta+)`.

    `norm="metric"` is the paper's equation, `rho U g / sqrt(g.Ug)`; its runs used the Euclidean norm, in which `rho`
    means what it means in SAM.

    `transport=False` is the paper's LLQR^Delta+SAM: the metric shapes the probe and does not change the update.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> geometry = Geometry(model, torch.nn.functional.cross_entropy, structure="e-kfac")
        >>> opt = LLQRSAM(torch.optim.SGD(model.parameters(), lr=0.1), geometry, rho=0.1)
    """

    def __init__(
        self,
        base: Base,
        geometry: GeometryLike,
        rho: Schedule = 0.05,
        *,
        transport: bool = True,
        norm: Norm = "euclidean",
        start_after: int = 0,
        **settings: Unpack[Settings],
    ) -> None:
        _check_given(geometry)
        super().__init__(
            base, rho, norm=norm, start_after=start_after, geometry=geometry, transport=transport, **settings
        )


class ASAM(Optimizer):
    """`T = |w| + eta` (1 for biases), `eps = rho T^2 g / |T g|`; with a geometry `eps = rho T U T g / |T g|_U`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> opt = ASAM(torch.optim.SGD([weight], lr=0.1), rho=0.5)
    """

    def __init__(
        self,
        base: Base,
        rho: Schedule = 0.5,
        *,
        eta: float = 0.01,
        norm: Norm = "metric",
        start_after: int = 0,
        **settings: Unpack[MethodSettings],
    ) -> None:
        super().__init__(base, ASAMProbe(rho, eta=eta, norm=norm, start_after=start_after), **settings)


class FisherSAM(Optimizer):
    """`eps = rho F^-1 g / sqrt(g.F^-1 g)` with `F^-1 = 1 / (g^2 + eta)`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> opt = FisherSAM(torch.optim.SGD([weight], lr=0.1), rho=0.1)
    """

    def __init__(
        self,
        base: Base,
        rho: Schedule = 0.1,
        *,
        eta: float = 0.1,
        norm: Norm = "metric",
        start_after: int = 0,
        **settings: Unpack[MethodSettings],
    ) -> None:
        super().__init__(base, FisherSAMProbe(rho, eta=eta, norm=norm, start_after=start_after), **settings)


class FriendlySAM(Optimizer):
    """F-SAM: the probe follows `g - gbar`, the part of the gradient that is specific to this batch.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> opt = FriendlySAM(torch.optim.SGD([weight], lr=0.1), rho=0.1, lam=0.6)
    """

    def __init__(
        self,
        base: Base,
        rho: Schedule = 0.05,
        lam: float = 0.9,
        *,
        norm: Norm = "euclidean",
        start_after: int = 0,
        **settings: Unpack[MethodSettings],
    ) -> None:
        super().__init__(base, FriendlySAMProbe(rho, lam=lam, norm=norm, start_after=start_after), **settings)


class LLQR(Optimizer):
    """No probe: the base optimizer on `U g`.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> geometry = Geometry(model, torch.nn.functional.cross_entropy)
        >>> opt = LLQR(torch.optim.SGD(model.parameters(), lr=0.1), geometry)
    """

    def __init__(self, base: Base, geometry: GeometryLike, **settings: Unpack[Settings]) -> None:
        _check_given(geometry)
        super().__init__(base, None, geometry, **settings)


def _check_given(geometry: GeometryLike | None) -> None:
    if geometry is None:
        raise TypeError("geometry: expected a llqr.Geometry, got None")


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

    `settings` are those of the probe (`rho`, `lam`, ...) and of `Optimizer` (`model`, `no_sync`, `same_dropout`,
    `buffers`).

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> build("fsam", torch.optim.SGD([weight], lr=0.1), rho=0.1, lam=0.6).probe.name
        'fsam'
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected one of {', '.join(method_names())}, got {name!r}")
    plain, divergence = _without_divergence(name.lower())
    if plain not in method_names():
        raise ValueError(f"name: unknown method {name!r}; choose one of {', '.join(method_names())}")
    learned = plain.startswith("llqr")
    if learned and geometry is None:
        raise ValueError(f"geometry: {name!r} needs one, pass geometry=llqr.Geometry(model, loss_fn)")
    if not learned and geometry is not None:
        learning = "llqr" if plain in BASES else f"llqr+{plain}"
        raise ValueError(f"geometry: {name!r} has none; did you mean {learning!r}?")
    if divergence and isinstance(geometry, Geometry) and geometry.divergence.name != divergence:
        raise ValueError(f"geometry: {name!r} wants the divergence {divergence!r}, got {geometry.divergence.name!r}")
    kind = plain.rpartition("+")[2]
    if kind not in PROBES:
        return Optimizer(base, None, geometry, **settings)
    of_optimizer = {key: settings.pop(key) for key in Settings.__annotations__ if key in settings}
    return Optimizer(base, PROBES[kind](**settings), geometry, transport="probe-only" not in plain, **of_optimizer)


def _without_divergence(name: str) -> tuple[str, str]:
    for divergence in ("ngd", "newton"):
        if name.startswith(f"llqr-{divergence}"):
            return name.replace(f"-{divergence}", "", 1), divergence
    return name, ""
