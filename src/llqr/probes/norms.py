"""How a displacement `d = U v` is scaled to the probe's radius: `theta+ = theta + rho d / norm`.

`1e-12` goes inside the root, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llqr.probes.sam import Point

TINY = 1e-12
NORMS = ("metric", "euclidean", "layer-metric", "layer-euclidean")

#: A user's own norm: `norm(v, d)` -> one divisor per parameter, which broadcasts against it.
CustomNorm = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
Norm = str | CustomNorm


def check_norm(norm: Norm) -> None:
    if not callable(norm) and norm not in NORMS:
        raise ValueError(f"norm: unknown {norm!r}; choose one of {', '.join(NORMS)}, or pass a function of v and d")


def divisors(norm: Norm, v: list[Tensor], d: list[Tensor], point: Point) -> Tensor | list[Tensor]:
    """One number for all or one tensor per parameter. Infinite where `v.d <= 0`: the probe stays at the centre."""
    if callable(norm):
        return _custom(norm, v, d, point)
    metric = norm.endswith("metric") and d is not v and any(a is not b for a, b in zip(v, d, strict=True))
    if not norm.startswith("layer-"):
        return _root(_total(_metric_total if metric else _euclidean_total, v, d, point), metric)
    # Each layer by its own norm, then 1 / sqrt(#layers), so that the whole displacement still has length rho.
    squares, count = _squares(_metric if metric else _euclidean, v, d, point), max(point.layers) + 1
    sums = squares.new_zeros(count).index_add_(0, _on_device(tuple(point.layers), squares.device), squares)
    roots = (_root(sums, metric) * count**0.5).unbind()
    return [roots[layer].to(part.device) for layer, part in zip(point.layers, d, strict=True)]


def length(parts: list[Tensor], point: Point) -> Tensor:
    """The Euclidean length of a vector of the parameters at a point; of sharded ones, over all ranks."""
    return _total(_euclidean_total, parts, parts, point).sqrt()


Measure = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def _total(measure: Measure, v: list[Tensor], d: list[Tensor], point: Point) -> Tensor:
    """`v.d` or `|d|^2` over all parameters; of sharded ones, over all ranks."""
    if point.sharding is None:
        return measure(v, d)
    first, *others = point.sharding.sums(measure, v, d)
    return sum((other.to(first.device) for other in others), first)


def _squares(measure: Measure, v: list[Tensor], d: list[Tensor], point: Point) -> Tensor:
    """`v.d` or `|d|^2`, one number per parameter; of sharded ones, over all ranks."""
    if point.sharding is None:
        return measure(v, d)
    sums = point.sharding.sums(measure, v, d)
    squares = sums[0].new_zeros(len(d))
    for own, places in zip(sums, point.sharding.kinds, strict=True):
        squares[places] = own.to(squares.device)
    return squares


def _metric_total(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    """In few kernels, however many parameters there are."""
    products = torch._foreach_mul(_widened(v), _widened(d))
    # As they are in memory: `flatten` would put each convolution in channels_last into another order first.
    flat = [product.as_strided((product.numel(),), (1,)) for product in products]
    # One copy of all parts, because `torch.cat` took long for so many on a GPU (results/protocol.md).
    joined = flat[0].new_empty(sum(map(len, flat)))
    torch._foreach_copy_(joined.split([len(part) for part in flat]), flat)
    return joined.sum()


def _euclidean_total(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    norms = _gathered(torch._foreach_norm(_widened(d), 2))
    return torch.dot(norms, norms)


def _metric(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    return _gathered([product.sum() for product in torch._foreach_mul(_widened(v), _widened(d))])


def _euclidean(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    return _gathered(torch._foreach_norm(_widened(d), 2)).square_()


def _custom(norm: CustomNorm, v: list[Tensor], d: list[Tensor], point: Point) -> list[Tensor]:
    sharding = point.sharding
    given = norm(v, d) if sharding is None else norm(sharding.joined(v), sharding.joined(d))
    if not isinstance(given, list | tuple) or len(given) != len(d) or not all(isinstance(one, Tensor) for one in given):
        raise TypeError(f"norm: expected the function to return a list of {len(d)} tensors, one divisor per parameter")
    return list(given) if sharding is None else sharding.parts(given)


@lru_cache(maxsize=16)
def _on_device(layers: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached from step to step: the host waits for a copy to the device."""
    return torch.tensor(layers, device=device)


def _gathered(numbers: Sequence[Tensor]) -> Tensor:
    """One number per parameter as a vector, on the device of the first."""
    try:
        return torch.stack(tuple(numbers))
    except RuntimeError:  # they are on several devices
        return torch.stack([number.to(numbers[0].device) for number in numbers])


def _root(square: Tensor, metric: bool) -> Tensor:
    root = square.add(TINY).sqrt_()
    return torch.where(square > 0, root, float("inf")) if metric else root


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """At least float32, because a sum of many small squares loses them in half precision."""
    return [tensor if tensor.dtype.itemsize >= 4 else tensor.float() for tensor in tensors]
