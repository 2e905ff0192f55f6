"""SAM's probe, the base class of all: a gradient (and a metric) in, a displacement of the weights out.

Every probe is `eps = rho T U T v / norm`: `v` is the gradient, possibly filtered; `T` is a diagonal rescaling of the
parameters; `U` is the geometry's metric, the identity without one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from llqr.distributed.dtensors import Sharding, local
from llqr.probes.norms import Norm, check_norm, divisors
from llqr.schedule import Schedule, at, check, check_number

Transport = Callable[[list[Tensor]], list[Tensor]]
#: Gradients whose squares overflow in float32 are above 2^64.
SMALL = 2.0**-64


@dataclass(frozen=True)
class Point:
    """The centre of a step: per parameter its weight, gradient and layer, and its own radius if it has one.

    With `sharding`, parameters are sharded, and gradients are this rank's parts.
    """

    parameters: list[Tensor]
    grads: list[Tensor]
    layers: list[int]
    is_bias: list[bool]
    rho: list[float | None]
    sharding: Sharding | None = None

    @property
    def weights(self) -> list[Tensor]:
        """The parameters' values, or this rank's parts of them."""
        return local([parameter.detach() for parameter in self.parameters])


class SAMProbe:
    """SAM: `eps = rho U g / |U g|`.

    Args:
        rho: the radius, a number or a function of the step; a parameter group's own `"rho"` takes precedence.
        norm: "euclidean" `|Uv|` (the paper's runs: rho means what it means in SAM), "metric" `sqrt(v.Uv)` (its
            equation), "layer-euclidean", "layer-metric", or a function `norm(v, d)` -> divisors. ASAM and FisherSAM
            are defined by the metric norm, which is their default.
        start_after: steps without a probe at the start (a warm-up).

    Example (`eps` for one parameter with the gradient (3, 4), no metric):
        >>> point = Point([torch.zeros(2)], [torch.tensor([3.0, 4.0])], layers=[0], is_bias=[False], rho=[None])
        >>> SAMProbe(rho=0.5).displacement(point, transport=lambda v: v, step=0)[0]
        tensor([0.3000, 0.4000])
    """

    name: ClassVar[str] = "sam"
    #: Whether `filtered` returns new tensors that nothing else refers to, so that `eps` may be computed in place.
    filters_into_new: ClassVar[bool] = False

    def __init__(self, rho: Schedule = 0.05, *, norm: Norm = "euclidean", start_after: int = 0) -> None:
        check("rho", rho, 0)
        check_norm(norm)
        self.rho = rho
        self.norm = norm
        self.start_after = check_number("start_after", start_after, 0)

    def active(self, step: int) -> bool:
        return step >= self.start_after

    def displacement(self, point: Point, transport: Transport, step: int) -> list[Tensor]:
        """`eps`, one tensor per parameter."""
        v = self.filtered(point)
        d, over = self._direction(point, v, transport)
        distinct = _distinct(over)
        # Not of sharded gradients: ranks may differ in whether their part is finite, and one would wait for the others.
        if point.sharding is None and any(map(_infinite, distinct)):
            d, over = self._without_overflow(point, v, transport, d, over)
            distinct = _distinct(over)
        radius = at(self.rho, step, "rho", 0)
        radii = [radius if own is None else own for own in point.rho]
        dtypes = {part.dtype for part in d}
        if torch.float16 in dtypes:
            return _scaled_wide(d, over, radii)
        if over[0].ndim == 0 and len(distinct) == len(set(radii)) == len(dtypes) == 1:
            scale = (radii[0] / over[0]).to(d[0].dtype)
            if self.filters_into_new and d is v:
                torch._foreach_mul_(d, scale)
                return d
            return list(torch._foreach_mul(d, scale))
        scales = torch._foreach_mul(torch._foreach_reciprocal(over), radii)
        return _product(d, [scale.to(part.dtype) for scale, part in zip(scales, d, strict=True)])

    def _direction(self, point: Point, v: list[Tensor], transport: Transport) -> tuple[list[Tensor], list[Tensor]]:
        """`T U T v`, and what it is divided by."""
        scaling = self.scaling(point)
        d = transport(v) if scaling is None else _product(scaling, transport(_product(scaling, v)))
        return d, divisors(self.norm, v, d, point.layers, point.sharding)

    def _without_overflow(
        self, point: Point, v: list[Tensor], transport: Transport, d: list[Tensor], over: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Direction and divisors where the squares of large gradients overflow: those of smaller ones, which are equal.

        Gradients that are not finite themselves are not remembered.
        """
        if not all(bool(part.isfinite().all()) for part in v):
            self.undo()
            return d, over
        again = self._direction(point, list(torch._foreach_mul(v, SMALL)), transport)
        rows = list(zip(zip(d, over, strict=True), zip(*again, strict=True), strict=True))
        chosen = [smaller if _infinite(given[1]) else given for given, smaller in rows]
        return [part for part, _ in chosen], [divisor for _, divisor in chosen]

    def settle(self) -> None:
        """The step is done: what the last displacement made the probe remember, it keeps."""

    def undo(self) -> None:
        """The step has failed or was abandoned: as if there had been no last displacement."""

    def filtered(self, point: Point) -> list[Tensor]:
        """`v`: the gradient that the displacement is computed from."""
        return point.grads

    def scaling(self, point: Point) -> list[Tensor] | None:
        """The diagonal `T`; None stands for the identity."""
        return None

    def state_dict(self, order: Sequence[Tensor]) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[Tensor]) -> None:
        pass


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Parameters share divisors, by default all of them one."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _infinite(divisor: Tensor) -> bool:
    """Whether it is known to be: a step waits for no device, and there an overflow leaves the weights at the centre."""
    return divisor.device.type == "cpu" and divisor.ndim == 0 and math.isinf(divisor.numpy())


def _scaled_wide(d: list[Tensor], over: list[Tensor], radii: list[float]) -> list[Tensor]:
    """`rho d / norm` where `rho / norm` may be too large for float16, as it is for tiny gradients."""
    return [(part.float() * (rho / norm)).to(part.dtype) for part, norm, rho in zip(d, over, radii, strict=True)]


def _product(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(a, b))
