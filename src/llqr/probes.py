"""Where SAM looks: a gradient (and a metric) in, a displacement of the weights out.

Every probe is `eps = rho T U T v / norm`: `v` is the gradient, possibly filtered; `T` is a diagonal rescaling of the
parameters; `U` is the geometry's metric, the identity without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .norms import Norm, check_norm, divisors
from .schedule import Schedule, at, check

Transport = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Point:
    """The centre of a step, parameter by parameter: weight, gradient, layer, and a radius of its own if it has one."""

    parameters: list[Tensor]
    grads: list[Tensor]
    layers: list[int]
    is_bias: list[bool]
    rho: list[float | None]


class SAMProbe:
    """SAM: `eps = rho U g / |g|_U`.

    Args:
        rho: the radius, a number or a function of the step; a parameter group's own `"rho"` goes first.
        norm: "metric" `sqrt(v.Uv)` (the paper's equation), "euclidean" `|Uv|` (its runs), "layer-metric",
            "layer-euclidean", or a function `norm(v, d)` -> divisors.
        start_after: steps without a probe at the start (a warm-up).

    Example (`eps` for one parameter with the gradient (3, 4), no metric):
        >>> point = Point([torch.zeros(2)], [torch.tensor([3.0, 4.0])], layers=[0], is_bias=[False], rho=[None])
        >>> SAMProbe(rho=0.5).displacement(point, transport=lambda v: v, step=0)[0]
        tensor([0.3000, 0.4000])
    """

    name: ClassVar[str] = "sam"
    #: Whether `filtered` makes new tensors every time, which nobody else holds, so that they may become `eps` in place.
    filters_into_new: ClassVar[bool] = False

    def __init__(self, rho: Schedule = 0.05, *, norm: Norm = "metric", start_after: int = 0) -> None:
        check("rho", rho, 0)
        check("start_after", start_after, 0)
        check_norm(norm)
        self.rho = rho
        self.norm = norm
        self.start_after = start_after

    def active(self, step: int) -> bool:
        return step >= self.start_after

    def displacement(self, point: Point, transport: Transport, step: int) -> list[Tensor]:
        """`eps`, beside the parameters."""
        v = self.filtered(point)
        scaling = self.scaling(point)
        d = transport(v) if scaling is None else _product(scaling, transport(_product(scaling, v)))
        over = divisors(self.norm, v, d, point.layers)
        radius = at(self.rho, step)
        radii = [radius if own is None else own for own in point.rho]
        if over[0].ndim == 0 and len(set(map(id, over))) == len(set(radii)) == len({part.dtype for part in d}) == 1:
            scale = (radii[0] / over[0]).to(d[0].dtype)
            if self.filters_into_new and d is v:
                torch._foreach_mul_(d, scale)
                return d
            return list(torch._foreach_mul(d, scale))
        scales = torch._foreach_mul(torch._foreach_reciprocal(over), radii)
        return _product(d, [scale.to(part.dtype) for scale, part in zip(scales, d, strict=True)])

    def filtered(self, point: Point) -> list[Tensor]:
        """`v`: the gradient the displacement is made from."""
        return point.grads

    def scaling(self, point: Point) -> list[Tensor] | None:
        """`T`; None is the identity."""
        return None

    def state_dict(self, order: Sequence[Tensor]) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[Tensor]) -> None:
        pass


class ASAMProbe(SAMProbe):
    """ASAM: `T = |w| + eta` (1 for biases), `eps = rho T^2 g / |T g|`.

    Example (a weight of 0 hardly moves):
        >>> point = Point([torch.tensor([0.0, 1.0])], [torch.ones(2)], layers=[0], is_bias=[False], rho=[None])
        >>> ASAMProbe(rho=1.0, eta=0.0).displacement(point, lambda v: v, step=0)[0]
        tensor([0., 1.])
    """

    name = "asam"

    def __init__(self, rho: Schedule = 0.5, *, eta: float = 0.01, norm: Norm = "metric", start_after: int = 0) -> None:
        super().__init__(rho, norm=norm, start_after=start_after)
        check("eta", eta, 0)
        self.eta = eta

    def scaling(self, point: Point) -> list[Tensor]:
        scaling = list(torch._foreach_abs([w.detach() for w in point.parameters]))
        torch._foreach_mul_(scaling, [0.0 if bias else 1.0 for bias in point.is_bias])
        torch._foreach_add_(scaling, [1.0 if bias else self.eta for bias in point.is_bias])
        return scaling


class FisherSAMProbe(SAMProbe):
    """FisherSAM: `F^-1 = 1 / (g^2 + eta)`, `eps = rho F^-1 g / sqrt(g.F^-1 g)`; the outer update is untouched by it.

    Example:
        >>> point = Point([torch.zeros(1)], [torch.ones(1)], layers=[0], is_bias=[False], rho=[None])
        >>> FisherSAMProbe(rho=1.0, eta=3.0).displacement(point, lambda v: v, step=0)[0]
        tensor([0.5000])
    """

    name = "fishersam"

    def __init__(self, rho: Schedule = 0.1, *, eta: float = 0.1, norm: Norm = "metric", start_after: int = 0) -> None:
        super().__init__(rho, norm=norm, start_after=start_after)
        check("eta", eta, 1e-12)
        self.eta = eta

    def scaling(self, point: Point) -> list[Tensor]:
        scaling = list(torch._foreach_mul(point.grads, point.grads))
        torch._foreach_add_(scaling, self.eta)
        torch._foreach_rsqrt_(scaling)
        return scaling


class FriendlySAMProbe(SAMProbe):
    """F-SAM: `v = g - gbar`, then `gbar <- lam gbar + (1 - lam) g`, with `gbar` starting at 0.

    Example (the second time, what both batches share is subtracted):
        >>> probe, weight = FriendlySAMProbe(rho=1.0, lam=0.0), torch.zeros(2)
        >>> for gradient in ([3.0, 0.0], [3.0, 4.0]):
        ...     point = Point([weight], [torch.tensor(gradient)], layers=[0], is_bias=[False], rho=[None])
        ...     print(probe.displacement(point, lambda v: v, step=0)[0])
        tensor([1., 0.])
        tensor([0., 1.])
    """

    name = "fsam"
    filters_into_new = True

    def __init__(self, rho: Schedule = 0.05, *, lam: float = 0.9, norm: Norm = "metric", start_after: int = 0) -> None:
        super().__init__(rho, norm=norm, start_after=start_after)
        check("lam", lam, 0, 1)
        self.lam = lam
        self._mean: dict[Tensor, Tensor] = {}

    def filtered(self, point: Point) -> list[Tensor]:
        for parameter, g in zip(point.parameters, point.grads, strict=True):
            if parameter not in self._mean:
                self._mean[parameter] = torch.zeros_like(g)
        means = [self._mean[parameter] for parameter in point.parameters]
        v = list(torch._foreach_sub(point.grads, means))
        torch._foreach_lerp_(means, point.grads, 1 - self.lam)
        return v

    def state_dict(self, order: Sequence[Tensor]) -> dict[str, Any]:
        return {"mean": {i: self._mean[parameter] for i, parameter in enumerate(order) if parameter in self._mean}}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[Tensor]) -> None:
        means: dict[Tensor, Tensor] = {}
        for i, mean in state["mean"].items():
            parameter = order[int(i)]
            if mean.shape != parameter.shape:
                raise ValueError(
                    f"state_dict: the F-SAM mean of parameter {i} has shape {tuple(mean.shape)}, "
                    f"expected {tuple(parameter.shape)}"
                )
            means[parameter] = mean.detach().to(parameter, copy=True)
        self._mean = means


def _product(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(a, b))


#: What every probe is: the base of the family.
Probe = SAMProbe
