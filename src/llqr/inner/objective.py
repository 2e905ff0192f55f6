"""The relaxed LQR objective as a function of the factors of `U`.

With `delta = -U g` the objective is `J(U) = g.delta + 1/2 delta.H delta + 1/2 damping |delta|^2`. Its gradient in `U g`
is the residual `r = (H + damping) U g - g`, and pulling `r` back through `U -> U g` gives the gradient of every factor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from llqr.curvature.quadratic import QuadraticModel
from llqr.metric import Factors, Metric
from llqr.metric.layout import Packed, quick_dot
from llqr.metric.structure import Pull, Structure

if TYPE_CHECKING:
    from llqr.cuda import Branches

T = TypeVar("T")

#: A group with this many entries in its factors keeps a device busy; beside others it would only take more memory.
LARGE = 2**25
#: Directions along which products are known, besides the last `v` itself.
DIRECTIONS = 2
#: A tensor of fewer entries takes longer to launch a kernel for than to compute.
SMALL = 2**20
#: A direction with a smaller share of its square outside the others holds only rounding errors, and is not used.
NEW = 1e-6


@dataclass(frozen=True)
class Evaluation:
    """`J` at some factors, from one product with `H`; computes value and slopes when asked for them."""

    objective: Objective
    Ug: Packed
    residual: Packed
    pulls: list[Pull]

    @property
    def value(self) -> Tensor:
        """`J = 1/2 (r - g).U g`, because `r + g` is the quadratic part applied to `U g`."""
        dot = self.objective.metric.dot
        return 0.5 * (dot(self.residual, self.Ug) - dot(self.objective.g, self.Ug))

    def slopes(self, *, finite: bool = False) -> list[Factors]:
        """The gradient of `J` in every factor, in the dtype the products ran in; see `Objective.pulled`."""
        return self.objective.pulled(self.pulls, self.residual, finite=finite)


class Objective:
    """`J` for the gradient and the curvature of one batch. Vectors are packed: one tensor per group of the metric.

    Args:
        quadratic: loss, gradient and product. Its gradient is copied into the packed layout; `self.quadratic` is the
            same model with views of that copy, so that the caller can free the original.
        damping: weight of `1/2 |delta|^2`: a number, or a share such as "10%" of the curvature `g.Hg / g.g`, which
            costs one more product.
        precision: what structures with matrix products compute `U g` and its pull-back in (default: the factors'
            dtype). Factors and vectors keep their own dtype, and `J` is summed in float64.
        branches: of a CUDA graph, in which groups are computed side by side.
    """

    def __init__(
        self,
        metric: Metric,
        quadratic: QuadraticModel,
        damping: float | str = 0.0,
        precision: torch.dtype | None = None,
        branches: Branches | None = None,
    ) -> None:
        self.metric, self.precision, self._branches = metric, precision, branches
        self.g = metric.pack(quadratic.gradient)
        views = metric.unpack(self.g, quadratic.gradient)
        self.quadratic = QuadraticModel(quadratic.loss, views, quadratic.product)
        self._operands = [self._lowered(group, part) for group, part in zip(metric.groups, self.g, strict=True)]
        self._damping = self._share(damping) if isinstance(damping, str) else damping

    def _share(self, damping: str) -> Tensor:
        """`lambda` as a share of `|g.Hg| / g.g`; the magnitude, because Newton's curvature may be negative."""
        g = self.quadratic.gradient
        Hg = self.quadratic.product(g)
        parts = list(g.values())
        along, square = self.metric.dot(parts, [Hg[name] for name in g]), self.metric.dot(parts, parts)
        return float(damping.strip().removesuffix("%")) / 100 * torch.where(square > 0, along.abs() / square, 0.0)

    @property
    def exact(self) -> Objective:
        """The same objective with products in the factors' own precision."""
        if self.precision is None:
            return self
        exact = copy.copy(self)
        exact.precision, exact._operands = None, self.g
        return exact

    def at(
        self, factors: Sequence[Factors], products: Extrapolation | None = None, *, product: bool = True
    ) -> Evaluation:
        """With one product with `H`, which `products` remembers; without one, from those that it remembers."""
        Ug, pulls = self._trace(factors)
        if product or products is None:
            residual = self._multiply(Ug)
            if products is not None:
                products.remember(Ug, residual)
        else:
            residual = products.product(Ug)
        torch._foreach_sub_(residual, self.g)
        return Evaluation(self, Ug, residual, pulls)

    def known(self, factors: Sequence[Factors], residual: Packed) -> Evaluation:
        """Without a product with `H`: from a residual that is known."""
        Ug, pulls = self._trace(factors)
        return Evaluation(self, Ug, residual, pulls)

    def along(self, direction: Sequence[Factors]) -> tuple[Packed, Packed]:
        """How `U g` and `r` change along a direction, for structures in whose factors `U` is linear."""
        Ug, _ = self._trace(direction)
        Ug = [part if own else torch.zeros_like(part) for part, own in zip(Ug, direction, strict=True)]
        return Ug, self._multiply(Ug)

    def pulled(self, pulls: list[Pull], residual: Packed, *, finite: bool = False) -> list[Factors]:
        """The gradient of `<residual, U g>` in every factor; with `finite`, other entries count as zero."""
        pairs = zip(pulls, residual, strict=True)
        return self.side_by_side([partial(_finite, pull, r) if finite else partial(pull, r) for pull, r in pairs])

    def side_by_side(self, each: Sequence[Callable[[], T]]) -> list[T]:
        """What these functions, one per group, return."""
        if self._branches is None:
            return [compute() for compute in each]
        return self._branches.run(each, [group.stored() for group in self.metric.groups], LARGE)

    def _trace(self, factors: Sequence[Factors]) -> tuple[Packed, list[Pull]]:
        """`U g` in the dtype of `g`, and the way back."""
        parts = zip(self.metric.groups, factors, self._operands, self.g, strict=True)
        traced = self.side_by_side([partial(self._traced, *part) for part in parts])
        return [Ug for Ug, _ in traced], [pull for _, pull in traced]

    def _traced(self, group: Structure, own: Factors, operand: Tensor, g: Tensor) -> tuple[Tensor, Pull]:
        Ug, pull = group.trace({name: self._lowered(group, factor) for name, factor in own.items()}, operand)
        return Ug.to(g.dtype), lambda r: pull(self._lowered(group, r))

    def _lowered(self, group: Structure, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision) if self.precision is not None and group.multiplies else tensor

    def _multiply(self, Ug: Packed) -> Packed:
        """`(H + damping) U g`."""
        model = self.quadratic
        HUg = self.metric.pack(model.product(self.metric.unpack(Ug, model.gradient)))
        if isinstance(self._damping, Tensor):
            for part, own in zip(HUg, Ug, strict=True):
                part.addcmul_(own, self._damping.to(part))
        elif self._damping:
            torch._foreach_add_(HUg, Ug, alpha=self._damping)
        return HUg


def _finite(pull: Pull, r: Tensor) -> Factors:
    # Row by row in memory, as the factors are: torch's fused optimizers look at nothing else.
    return {name: slope.contiguous().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for name, slope in pull(r).items()}


class Extrapolation:
    """`H v` extrapolated from earlier products: `H` is linear, and the inner loop's vectors change little per step.

    A new `v` is split into the last one, its part along the differences between the last few, and a remainder whose
    product counts as zero. Reads nothing from the device and keeps its memory from refresh to refresh, so that all of
    it can run in CUDA graphs. Holds `2 (1 + DIRECTIONS)` vectors of the weights' size.

    Args:
        dot: the inner product, over all ranks where each has a part of the vectors.
    """

    def __init__(self, dot: Callable[[Packed, Packed], Tensor] = quick_dot) -> None:
        self._product = dot
        # Pairs `(v, H v)`, one list of tensors each: the last one, and directions that are orthogonal in `v`.
        self._last: Packed = []
        self._directions: list[Packed] = []
        # For every direction: 1 / |d|^2, or zero if it is not to be used, and the last `v`'s coordinate along it.
        self._weights: list[Tensor] = []
        self._places: list[Tensor] = []

    def forget(self) -> None:
        """Start over from `H 0 = 0`."""
        for tensor in (*self._last, *(x for pair in self._directions for x in pair), *self._weights, *self._places):
            tensor.zero_()

    def remember(self, v: Packed, Hv: Packed) -> None:
        """`Hv` is `H v`; both are copied."""
        pair = [*joined(v), *joined(Hv)]
        if not self._last:
            self._last, *self._directions = ([torch.zeros_like(part) for part in pair] for _ in range(1 + DIRECTIONS))
            numbers = [torch.zeros((), dtype=torch.float64, device=pair[0].device) for _ in range(2 * DIRECTIONS)]
            self._weights, self._places = numbers[:DIRECTIONS], numbers[DIRECTIONS:]
        for newer, older in reversed(list(pairwise(self._directions))):
            torch._foreach_copy_(older, newer)
        for difference, now, before in zip(self._directions[0], pair, self._last, strict=True):
            torch.sub(now, before, out=difference)
        torch._foreach_copy_(self._last, pair)
        for i in range(DIRECTIONS):
            self._set_apart(i)

    def product(self, v: Packed) -> Packed:
        """About `H v`."""
        known = joined(v)
        Hv = self._last[len(known) :]
        for direction, weight, place in zip(self._directions, self._weights, self._places, strict=True):
            times = (self._product(known, direction[: len(known)]) - place) * weight
            Hv = [torch.addcmul(own, d, times.to(d)) for own, d in zip(Hv, direction[len(known) :], strict=True)]
        return parted(Hv, v)

    def _set_apart(self, i: int) -> None:
        """Make direction `i` orthogonal to the ones before it, which are so to one another."""
        direction = self._directions[i]
        before = square = self._dot(direction, direction)
        for other, weight in zip(self._directions[:i], self._weights[:i], strict=True):
            share = -self._dot(direction, other) * weight
            for own, part in zip(direction, other, strict=True):
                own.addcmul_(part, share.to(part))
        if i > 0:
            square = self._dot(direction, direction)
        self._weights[i].copy_(torch.where(square > NEW * before, 1 / square, 0.0))
        self._places[i].copy_(self._dot(self._last, direction))

    def _dot(self, a: Packed, b: Packed) -> Tensor:
        """Of the vectors `v` of two pairs."""
        return self._product(a[: len(a) // 2], b[: len(b) // 2])


def joined(parts: Packed) -> Packed:
    """The same vector with small parts put together, so that fewer kernels are launched for each operation on it."""
    bundles = [[parts[i] for i in bundle] for bundle in _bundles(parts)]
    return [own[0].flatten() if len(own) == 1 else torch.cat([part.flatten() for part in own]) for own in bundles]


def parted(bundles: Packed, like: Packed) -> Packed:
    """The inverse of `joined`: views in the shapes of `like`."""
    found: dict[int, Tensor] = {}
    for joint, bundle in zip(bundles, _bundles(like), strict=True):
        for i, part in zip(bundle, joint.split([like[i].numel() for i in bundle]), strict=True):
            found[i] = part.view(like[i].shape)
    return [found[i] for i in range(len(like))]


def _bundles(parts: Packed) -> list[list[int]]:
    """Which parts are put together, by their places."""
    bundles: dict[object, list[int]] = {}
    for i, part in enumerate(parts):
        bundles.setdefault((part.device, part.dtype) if part.numel() < SMALL else i, []).append(i)
    return list(bundles.values())
