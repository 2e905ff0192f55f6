"""How a displacement `d = U v` is scaled to the probe's radius: `theta+ = theta + rho d / norm`.

A norm is a function of `v` and `d` (lists with one tensor per parameter) and of the layer each parameter belongs to; it
returns one divisor per parameter, which broadcasts against it. `1e-12` goes inside the root, as in the paper's runs.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from llqr.distributed.dtensors import Sharding

TINY = 1e-12
#: A tensor of this many entries gets its own kernel in a sum; smaller ones share a few. BLAS counts in 31 bits.
LARGE = range(2**18, 2**31)

Divisors = list[Tensor]
#: A user's own norm: `norm(v, d)` -> one divisor per parameter.
CustomNorm = Callable[[list[Tensor], list[Tensor]], Divisors]
Norm = str | CustomNorm


def _metric_squares(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    """`v.d`, one number per parameter; `|v|^2` when there is no metric between them."""
    if _identical(v, d):
        return _euclidean_squares(v, d)
    products = torch._foreach_mul(_widened(v), _widened(d))
    # A signed sum in multi-tensor kernels: the sum of all magnitudes minus twice that of the negative terms.
    magnitudes = _gathered(torch._foreach_norm(products, 1))
    torch._foreach_clamp_max_(products, 0.0)
    negatives = _gathered(torch._foreach_norm(products, 1))
    return magnitudes.sub(negatives, alpha=2)


def _metric_total(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    """`v.d` over all parameters."""
    if _identical(v, d):
        return _euclidean_total(v, d)
    parts: dict[torch.device, list[Tensor]] = {}
    small: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(_widened(v), _widened(d), strict=True):
        if a.numel() in LARGE and a.stride() == b.stride() and _dense(a):
            parts.setdefault(a.device, []).append(torch.dot(_in_memory_order(a), _in_memory_order(b)).view(1))
        else:
            for own, tensor in zip(small.setdefault(a.device, ([], [])), (a, b), strict=True):
                own.append(tensor)
    for device, (left, right) in small.items():
        parts.setdefault(device, []).extend(map(_in_memory_order, torch._foreach_mul(left, right)))
    return _added([torch.cat(own).sum() for own in parts.values()])


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as a vector. A sum does not depend on the order, and this is a view for channels-last too."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _euclidean_squares(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    """`|d|^2`, one number per parameter."""
    return _gathered(torch._foreach_norm(_widened(d), 2)).square()


def _euclidean_total(v: Sequence[Tensor], d: Sequence[Tensor]) -> Tensor:
    """`|d|^2` over all parameters."""
    norms = _gathered(torch._foreach_norm(_widened(d), 2))
    return torch.dot(norms, norms)


GLOBAL = {"metric": _metric_total, "euclidean": _euclidean_total}
BY_PARAMETER = {"layer-metric": _metric_squares, "layer-euclidean": _euclidean_squares}
NORMS = (*GLOBAL, *BY_PARAMETER)


def check_norm(norm: Norm) -> None:
    if not callable(norm) and norm not in NORMS:
        raise ValueError(f"norm: unknown {norm!r}; choose one of {', '.join(NORMS)}, or pass a function of v and d")


def divisors(
    norm: Norm, v: list[Tensor], d: list[Tensor], layers: Sequence[int], sharding: Sharding | None = None
) -> Divisors:
    """One divisor per parameter. Infinite where `v.d` is not positive, so that the probe stays at the centre there.

    With `sharding`, `v` and `d` are this rank's parts of tensors, whose norms are those of all parts together.
    """
    if callable(norm):
        if sharding is None:
            return _checked(norm(v, d), len(d))
        return sharding.parts(_checked(norm(sharding.joined(v), sharding.joined(d)), len(d)))
    if norm in GLOBAL:
        root = _root(GLOBAL[norm](v, d) if sharding is None else _added(sharding.sums(GLOBAL[norm], v, d)))
        places = {device: root.to(device) for device in {part.device for part in d}}
        return [root] * len(d) if len(places) == 1 else [places[part.device] for part in d]
    # Each layer by its own norm, then 1 / sqrt(#layers), so that the whole displacement still has length rho.
    count = max(layers) + 1
    if sharding is None:
        sums = _by_layer(BY_PARAMETER[norm](v, d), layers, count)
    else:
        squares = zip(sharding.sums(BY_PARAMETER[norm], v, d), sharding.kinds, strict=True)
        sums = _added([_by_layer(own, [layers[place] for place in places], count) for own, places in squares])
    roots = (_root(sums) * count**0.5).unbind()
    return [roots[layer].to(part.device) for layer, part in zip(layers, d, strict=True)]


def _checked(given: Divisors, count: int) -> Divisors:
    """What a user's own norm returns: one divisor for every parameter, also where all of them are the same."""
    if isinstance(given, list | tuple) and len(given) == count and all(isinstance(one, Tensor) for one in given):
        return list(given)
    raise TypeError(f"norm: expected the function to return a list of {count} tensors, one divisor per parameter")


def _by_layer(squares: Tensor, layers: Sequence[int], count: int) -> Tensor:
    return squares.new_zeros(count).index_add_(0, _on_device(tuple(layers), squares.device), squares)


def _added(numbers: Sequence[Tensor]) -> Tensor:
    """On the device of the first."""
    first, *others = numbers
    return sum((other.to(first.device) for other in others), first)


@lru_cache(maxsize=16)
def _on_device(layers: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached from step to step: the host waits for a copy to the device."""
    return torch.tensor(layers, device=device)


def _identical(v: Sequence[Tensor], d: Sequence[Tensor]) -> bool:
    return v is d or all(a is b for a, b in zip(v, d, strict=True))


def _gathered(numbers: Sequence[Tensor]) -> Tensor:
    """One number per parameter as a vector, on the device of the first."""
    home = numbers[0].device
    return torch.stack([number if number.device == home else number.to(home) for number in numbers])


def _root(square: Tensor) -> Tensor:
    return torch.where(square > 0, (square + TINY).sqrt(), float("inf"))


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """At least float32, because a sum of many small squares loses them in half precision."""
    return [tensor if tensor.dtype.itemsize >= 4 else tensor.float() for tensor in tensors]
