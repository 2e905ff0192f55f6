"""`H v` from products made before: `H` is linear, and what the inner loop multiplies changes little a step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from llqr.metric.packed import Packed, quick_dot

#: Directions along which products are known, besides the point they start from.
DIRECTIONS = 2
#: A direction of which less than this (of its square) is new beside the others says nothing but rounding errors.
NEW = 1e-6


class KnownProducts:
    """The last product `(v, H v)`, and how the ones before it differ from it.

    A new `v` is taken apart into the last one, what of the rest lies along the known directions, and a remainder, which
    counts as if `H` made nothing of it. Nothing is read from the device, and memory is kept from refresh to refresh, so
    that CUDA graphs can do all of it. It holds `2 (1 + DIRECTIONS)` vectors of the weights' size.
    """

    def __init__(self) -> None:
        self._v: Packed = []
        self._bent: Packed = []
        self._directions: list[tuple[Packed, Packed]] = []
        # Of every direction: 1 / |d|^2, or zero for one that is not to be used, and where along it the last `v` lies.
        self._weights: list[Tensor] = []
        self._places: list[Tensor] = []

    def forget(self) -> None:
        """Know only `H 0 = 0`."""
        for tensor in (*self._v, *self._bent, *(x for pair in self._directions for part in pair for x in part)):
            tensor.zero_()
        for number in (*self._weights, *self._places):
            number.zero_()

    def remember(self, v: Packed, bent: Packed) -> None:
        """`bent` is `H v`; both are copied."""
        if not self._v:
            self._make_room(v, bent)
        for newer, older in reversed(list(pairwise(self._directions))):
            for kept, moving in zip(older, newer, strict=True):
                torch._foreach_copy_(kept, moving)
        for new, last, step in ((v, self._v, self._directions[0][0]), (bent, self._bent, self._directions[0][1])):
            torch._foreach_copy_(step, new)
            torch._foreach_sub_(step, last)
            torch._foreach_copy_(last, new)
        for i in range(DIRECTIONS):
            self._set_apart(i)

    def product(self, v: Packed) -> Packed:
        """About `H v`."""
        bent = [part.clone() for part in self._bent]
        for (direction, change), weight, place in zip(self._directions, self._weights, self._places, strict=True):
            _add(bent, change, (quick_dot(v, direction) - place) * weight)
        return bent

    def _make_room(self, v: Packed, bent: Packed) -> None:
        def blank(parts: Packed) -> Packed:
            return [torch.zeros_like(part) for part in parts]

        self._v, self._bent = blank(v), blank(bent)
        self._directions = [(blank(v), blank(bent)) for _ in range(DIRECTIONS)]
        self._weights = [torch.zeros((), dtype=torch.float64, device=v[0].device) for _ in range(DIRECTIONS)]
        self._places = [torch.zeros_like(weight) for weight in self._weights]

    def _set_apart(self, i: int) -> None:
        """Make direction `i` orthogonal to the ones before it, which are so to one another."""
        direction, change = self._directions[i]
        before = square = quick_dot(direction, direction)
        for (other, its_change), weight in zip(self._directions[:i], self._weights[:i], strict=True):
            share = -quick_dot(direction, other) * weight
            _add(direction, other, share)
            _add(change, its_change, share)
        if i > 0:
            square = quick_dot(direction, direction)
        self._weights[i].copy_(torch.where(square > NEW * before, 1 / square, 0.0))
        self._places[i].copy_(quick_dot(self._v, direction))


def _add(to: Packed, parts: Packed, times: Tensor) -> None:
    """`to <- to + times parts`, in place."""
    for own, part in zip(to, parts, strict=True):
        own.addcmul_(part, times.to(part))
