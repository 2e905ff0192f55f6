"""How a displacement `d = U v` is brought to the probe's radius: `theta+ = theta + rho d / norm`.

A norm is a function of `v` and `d` (lists beside the parameters) and of the layer every parameter belongs to; it
returns one divisor a parameter, which broadcasts against it. `1e-12` goes inside the root, as in the paper's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TINY = 1e-12

Divisors = list[Tensor]
#: A norm of one's own: `norm(v, d)` -> one divisor a parameter.
CustomNorm = Callable[[list[Tensor], list[Tensor]], Divisors]
Norm = str | CustomNorm


def _metric_squares(v: Sequence[Tensor], d: Sequence[Tensor]) -> list[Tensor]:
    """`v.d`, parameter by parameter; `|v|^2` when there is no metric between them."""
    if all(a is b for a, b in zip(v, d, strict=True)):
        return _euclidean_squares(v, d)
    products = torch._foreach_mul(_widened(v), _widened(d))
    # A signed sum in multi-tensor kernels: the sum of all magnitudes, less twice that of the negative terms.
    magnitudes = torch._foreach_norm(products, 1)
    negatives = torch._foreach_norm(torch._foreach_clamp_max(products, 0.0), 1)
    return list(torch._foreach_sub(magnitudes, torch._foreach_mul(negatives, 2.0)))


def _euclidean_squares(v: Sequence[Tensor], d: Sequence[Tensor]) -> list[Tensor]:
    """`|d|^2`, parameter by parameter."""
    norms = torch._foreach_norm(_widened(d), 2)
    return list(torch._foreach_mul(norms, norms))


SQUARES = {"metric": _metric_squares, "euclidean": _euclidean_squares}
NORMS = ("metric", "euclidean", "layer-metric", "layer-euclidean")


def check_norm(norm: Norm) -> None:
    if not callable(norm) and norm not in NORMS:
        raise ValueError(f"norm: unknown {norm!r}; choose one of {', '.join(NORMS)}, or pass a function of v and d")


def divisors(norm: Norm, v: list[Tensor], d: list[Tensor], layers: Sequence[int]) -> Divisors:
    """One divisor a parameter. Infinite where `v.d` is not positive, so that the probe stays at the centre there."""
    if callable(norm):
        return norm(v, d)
    squares = SQUARES[norm.removeprefix("layer-")](v, d)
    if not norm.startswith("layer-"):
        home = squares[0].device
        root = _root(torch.stack([square.to(home) for square in squares]).sum())
        places = {device: root.to(device) for device in {part.device for part in d}}
        return [root] * len(d) if len(places) == 1 else [places[part.device] for part in d]
    # Each layer by its own norm, then 1 / sqrt(#layers), so that the whole displacement still has length rho.
    sums: dict[int, Tensor] = {}
    for layer, square in zip(layers, squares, strict=True):
        sums[layer] = sums[layer] + square.to(sums[layer].device) if layer in sums else square
    roots = {layer: _root(total) * len(sums) ** 0.5 for layer, total in sums.items()}
    return [roots[layer].to(part.device) for layer, part in zip(layers, d, strict=True)]


def _root(square: Tensor) -> Tensor:
    return torch.where(square > 0, (square + TINY).sqrt(), float("inf"))


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """At least float32, because a sum of many small squares is lost in half precision."""
    return [tensor if tensor.dtype.itemsize >= 4 else tensor.float() for tensor in tensors]
