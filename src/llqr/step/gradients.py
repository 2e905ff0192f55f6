"""Other gradients in the place of a parameter's own, for as long as an optimizer looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def standing_in(moved: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """`moved` as the gradients of `parameters`, without a copy; their own, `grads`, are given back at the end.

    Given back, because a captured closure writes to the memory of those very tensors. What does not lie in memory as
    the gradient does is copied over it instead: fused optimizers go through parameters and gradients in step.
    """
    lent: list[tuple[Tensor, Tensor]] = []
    copied: list[tuple[Tensor, Tensor]] = []
    for parameter, own, other in zip(parameters, grads, moved, strict=True):
        if other is own:
            continue
        if _lie_alike(own, other):
            lent.append((parameter, own))
            parameter.grad = other
        else:
            copied.append((own, other))
    if copied:
        torch._foreach_copy_([own for own, _ in copied], [other for _, other in copied])
    try:
        yield
    finally:
        for parameter, own in lent:
            parameter.grad = own


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device
