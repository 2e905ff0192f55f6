"""SAM's probe, the base class of all probes: a gradient (and a metric) in, a displacement of the weights out.

Every probe is `eps = rho T U T v / norm`: `v` is the gradient, possibly filtered; `T` is a diagonal rescaling of the
parameters; `U` is the geometry's metric, the identity without one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from llqr.checks import RADIUS
from llqr.distributed.dtensors import Sharding, local
from llqr.probes.norms import Norm, check_norm, divisors
from llqr.schedule import Schedule, at, check, check_number

Radius = Schedule | None  # None is refused, with a sentence
Transport = Callable[[list[Tensor]], list[Tensor]]


@dataclass
class Point:
    """Parameters and their gradients at the centre of a step.

    Attributes:
        grads: without the loss scale; the list is emptied before the second pass, to free them.
        names: the parameters' names, where they are known; layers and biases are told by them.
        radii: the radius of each parameter whose group has its own `"rho"`.
        sharding: given if parameters are sharded; gradients are then this rank's parts.
        overwrite: whether `eps` may take the memory of the gradients, because the next pass replaces them.
    """

    parameters: list[Tensor]
    grads: list[Tensor]
    names: Mapping[Tensor, str] = field(default_factory=dict)
    radii: Mapping[Tensor, float] = field(default_factory=dict)
    sharding: Sharding | None = None
    overwrite: bool = False

    @property
    def weights(self) -> list[Tensor]:
        """The values of the parameters, or this rank's parts of them."""
        return local([parameter.detach() for parameter in self.parameters])

    @cached_property
    def layers(self) -> list[int]:
        """The number of each parameter's layer: `a.weight` and `a.bias` share one; one without a name has its own."""
        numbers: dict[object, int] = {}
        return [numbers.setdefault(self._layer(parameter), len(numbers)) for parameter in self.parameters]

    @cached_property
    def is_bias(self) -> list[bool]:
        """By name; a vector without a name counts as a bias."""
        return [self.names[p].endswith("bias") if p in self.names else p.ndim <= 1 for p in self.parameters]

    def _layer(self, parameter: Tensor) -> object:
        name = self.names.get(parameter)
        if name is None:
            return parameter
        owner, _, own = name.rpartition(".")
        return owner if own.endswith(("weight", "bias")) else name


class SAMProbe:
    """SAM: `eps = rho U g / sqrt(g.Ug)`; without a metric `rho g / |g|`.

    Args:
        rho: the radius, a number or a function of the step; no second pass where it is 0. A parameter group's own
            `"rho"` takes precedence; the other groups show this one.
        norm: "metric" `sqrt(v.Uv)` (the paper's equation), "euclidean" `|Uv|` (the authors' code; `|eps|` is rho),
            "layer-metric", "layer-euclidean", or a function `norm(v, d)` -> divisors. Without a metric (or ASAM's and
            FisherSAM's scaling) the first two are the same.
        start_after: steps without a probe at the start (a warm-up).
        every: probe in one step of this many, a number or a function of the step, counted from `start_after`; the steps
            between take one pass. A larger `rho` makes up for part of what they miss.

    Example (`eps` for one parameter with the gradient (3, 4), no metric):
        >>> point = Point([torch.zeros(2)], [torch.tensor([3.0, 4.0])])
        >>> SAMProbe(rho=0.5).displacement(point, transport=lambda v: v, step=0)[0]
        tensor([0.3000, 0.4000])
    """

    name: ClassVar[str] = "sam"

    def __init__(self, rho: Radius = None, *, norm: Norm = "metric", start_after: int = 0, every: Schedule = 1) -> None:
        if rho is None:
            raise TypeError(RADIUS)
        check("rho", rho, 0)
        check_norm(norm)
        check("every", every, 1)
        self.rho = rho
        self.norm = norm
        self.start_after = round(check_number("start_after", start_after, 0))
        self.every = every

    def active(self, step: int) -> bool:
        """Whether this step takes a second pass, at the probe."""
        after = step - self.start_after
        return after >= 0 and (self.every == 1 or after % round(at(self.every, step, "every", 1)) == 0)

    def displacement(self, point: Point, transport: Transport, step: int) -> list[Tensor]:
        """`eps`, one tensor per parameter. A gradient whose square overflows stays at the centre."""
        v, T = self.filtered(point), self.scaling(point)
        d = transport(v) if T is None else _product(T, transport(_product(T, v)))
        over = divisors(self.norm, v, d, point)
        rho = at(self.rho, step, "rho", 0)
        dtypes, devices = {part.dtype for part in v}, {part.device for part in d}
        half = torch.float16 in dtypes  # where `rho / norm` overflows for tiny gradients, and `rho d / norm` does not
        if isinstance(over, Tensor) and not (half or point.radii) and len(dtypes) == len(devices) == 1:
            scale = over.reciprocal().mul_(rho).to(d[0].dtype)  # as `rho / over` is computed, in fewer calls
            if point.overwrite and d is point.grads:
                torch._foreach_mul_(d, scale)
                return d
            return list(torch._foreach_mul(d, scale))
        each = [over.to(part.device) for part in d] if isinstance(over, Tensor) else over
        scales = [point.radii.get(p, rho) / own for p, own in zip(point.parameters, each, strict=True)]
        if half:
            return [(part.float() * scale).to(own.dtype) for own, part, scale in zip(v, d, scales, strict=True)]
        return _product(d, [scale.to(part.dtype) for scale, part in zip(scales, d, strict=True)])

    def settle(self) -> None:
        """The step is done: the probe keeps what it has learned from the last displacement."""

    def undo(self) -> None:
        """The step failed: the probe forgets the last displacement."""

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


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """float16 as float32: products of a scaling and a gradient leave the range of float16."""
    return [tensor.float() if tensor.dtype == torch.float16 else tensor for tensor in tensors]


def _product(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(a, b))
