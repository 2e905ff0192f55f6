"""`H v` extrapolated from earlier products: `H` is linear, and the inner loop's vectors change little per step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from llqr.metric.packed import Packed, joined, parted, quick_dot

#: Directions along which products are known, besides the last `v` itself.
DIRECTIONS = 2
#: A direction with a smaller share of its square outside the others holds only rounding errors, and is not used.
NEW = 1e-6


class Extrapolation:
    """The last product `(v, H v)`, and the differences between it and the ones before.

    A new `v` is split into the last one, its part along the known directions, and a remainder whose product counts as
    zero. Nothing is read from the device, and memory is kept from refresh to refresh, so that all of it can run in CUDA
    graphs. It holds `2 (1 + DIRECTIONS)` vectors of the weights' size.

    Args:
        dot: the inner product, over all ranks where each has a part of the vectors.
    """

    def __init__(self, dot: Callable[[Packed, Packed], Tensor] = quick_dot) -> None:
        self._dot = dot
        self._v: Packed = []
        self._Hv: Packed = []
        self._directions: list[tuple[Packed, Packed]] = []
        # For every direction: 1 / |d|^2, or zero if it is not to be used, and the last `v`'s coordinate along it.
        self._weights: list[Tensor] = []
        self._places: list[Tensor] = []

    def forget(self) -> None:
        """Start over from `H 0 = 0`."""
        for tensor in (*self._v, *self._Hv, *(x for pair in self._directions for part in pair for x in part)):
            tensor.zero_()
        for number in (*self._weights, *self._places):
            number.zero_()

    def remember(self, v: Packed, Hv: Packed) -> None:
        """`Hv` is `H v`; both are copied."""
        v, Hv = joined(v), joined(Hv)
        if not self._v:
            self._make_room(v, Hv)
        for newer, older in reversed(list(pairwise(self._directions))):
            for kept, moving in zip(older, newer, strict=True):
                torch._foreach_copy_(kept, moving)
        for new, last, step in ((v, self._v, self._directions[0][0]), (Hv, self._Hv, self._directions[0][1])):
            for difference, now, before in zip(step, new, last, strict=True):
                torch.sub(now, before, out=difference)
            torch._foreach_copy_(last, new)
        for i in range(DIRECTIONS):
            self._set_apart(i)

    def product(self, v: Packed) -> Packed:
        """About `H v`."""
        bundles, Hv = joined(v), self._Hv
        for (direction, change), weight, place in zip(self._directions, self._weights, self._places, strict=True):
            times = (self._dot(bundles, direction) - place) * weight
            Hv = [torch.addcmul(own, part, times.to(part)) for own, part in zip(Hv, change, strict=True)]
        return parted(Hv, v)

    def _make_room(self, v: Packed, Hv: Packed) -> None:
        def blank(parts: Packed) -> Packed:
            return [torch.zeros_like(part) for part in parts]

        self._v, self._Hv = blank(v), blank(Hv)
        self._directions = [(blank(v), blank(Hv)) for _ in range(DIRECTIONS)]
        self._weights = [torch.zeros((), dtype=torch.float64, device=v[0].device) for _ in range(DIRECTIONS)]
        self._places = [torch.zeros_like(weight) for weight in self._weights]

    def _set_apart(self, i: int) -> None:
        """Make direction `i` orthogonal to the ones before it, which are so to one another."""
        direction, change = self._directions[i]
        before = square = self._dot(direction, direction)
        for (other, its_change), weight in zip(self._directions[:i], self._weights[:i], strict=True):
            share = -self._dot(direction, other) * weight
            _add(direction, other, share)
            _add(change, its_change, share)
        if i > 0:
            square = self._dot(direction, direction)
        self._weights[i].copy_(torch.where(square > NEW * before, 1 / square, 0.0))
        self._places[i].copy_(self._dot(self._v, direction))


def _add(to: Packed, parts: Packed, times: Tensor) -> None:
    """`to <- to + times parts`, in place."""
    for own, part in zip(to, parts, strict=True):
        own.addcmul_(part, times.to(part))
