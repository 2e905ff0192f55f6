"""The gradients of an optimizer's parameters: collected, cleared, and replaced while the base optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from llqr.distributed.dtensors import is_sharded, sharded_like, versions

#: An attribute of gradients that a finished step has left behind: their version at that time.
LEFT = "_left_by_llqr"


def collected(parameters: list[Tensor], name_of: Callable[[Tensor], str | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that have a gradient, and these gradients; sparse and complex ones are refused by name.

    Gradients of sharded parameters are sharded likewise, even if a rank has only its share of the sum yet.
    """
    grads = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if any(layout != torch.strided or dtype.is_complex for layout, dtype in {(g.layout, g.dtype) for g in grads}):
        _refuse(parameters, name_of)
    having = parameters if len(grads) == len(parameters) else [p for p in parameters if p.grad is not None]
    return having, sharded_like(having, grads)


def _refuse(parameters: list[Tensor], name_of: Callable[[Tensor], str | None]) -> None:
    for i, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None and (gradient.layout != torch.strided or gradient.is_complex()):
            name = name_of(parameter) or f"number {i}"
            kind, instead = (
                ("complex", "keep torch.view_as_real of it as the parameter")
                if gradient.is_complex()
                else ("sparse", "make the embedding with sparse=False")
            )
            raise TypeError(f"parameters: {name!r} has a {kind} gradient, which is not supported; {instead}")


def leave(parameters: Iterable[Tensor]) -> None:
    """Mark the gradients as those of a step that is over: the next step clears them.

    An attribute of the gradient, because an identity alone is reused, and a reference would keep its memory alive.
    """
    grads = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    for gradient, version in zip(grads, versions(grads), strict=True):
        setattr(gradient, LEFT, version)


def clear(parameters: Iterable[Tensor]) -> None:
    """Remove the gradients, so that a closure that does not zero them is still right."""
    _clear([(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None])


def clear_left(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Remove the gradients that a step has left behind; returns the parameters that have others."""
    pairs = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    left, outside = [], []
    for (parameter, gradient), version in zip(pairs, versions([gradient for _, gradient in pairs]), strict=True):
        if getattr(gradient, LEFT, None) == version:
            left.append((parameter, gradient))
        else:
            outside.append(parameter)
    _clear(left)
    return outside


def _clear(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """On a CUDA device in place: a captured closure cannot zero gradients, and it writes to their memory.

    Not those of sharded parameters, which FSDP makes anew.
    """
    in_place = []
    for parameter, gradient in pairs:
        if gradient.is_cuda and gradient.layout == torch.strided and not is_sharded(gradient):
            in_place.append(gradient)
        else:
            parameter.grad = None
    if in_place:
        torch._foreach_zero_(in_place)


@contextmanager
def substituted(Ug: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """`Ug` as the gradients of `parameters`, without a copy; at the end they have their own, `grads`, again.

    The very tensors are put back, because a captured closure writes to their memory. A `Ug` in another memory order or
    dtype is copied into the gradient instead: fused optimizers traverse parameters and gradients in the same order.
    """
    replaced: list[tuple[Tensor, Tensor]] = []
    overwritten: list[tuple[Tensor, Tensor]] = []
    for parameter, own, other in zip(parameters, grads, Ug, strict=True):
        if other is own:
            continue
        if _same_layout(own, other):
            replaced.append((parameter, own))
            parameter.grad = other
        elif 0 in own.stride():  # expanded, as `torch.autograd.grad` may return it: there is no room in it
            replaced.append((parameter, own))
            parameter.grad = torch.empty_like(parameter).copy_(other)
        else:
            overwritten.append((own, other))
    if overwritten:
        torch._foreach_copy_([own for own, _ in overwritten], [other for _, other in overwritten])
    try:
        yield
    finally:
        for parameter, own in replaced:
            parameter.grad = own


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device
