"""Gradients that a backward pass outside the closure left there, before a step with a probe."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from llqr.distributed.dtensors import Sharding, local, versions

REFUSAL = (
    "step: the gradients of a backward pass outside the closure are there, and a probe needs them at its second pass "
    "too; let the closure compute the loss of all micro-batches (it is called twice, with no backward pass before the "
    "step), or use first_step() and second_step(); in Lightning, Hugging Face and Accelerate, see llqr.integrations"
)


class OutsideGradients:
    """While entered, a closure that adds to these parameters' gradients is refused; one that zeroes them is not.

    They are zeroed here, in place. A closure that adds to such a gradient writes to it once; one that zeroes it before
    writes twice, or replaces it. So nothing has to be read from a device, unless a sentence is due.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        owners: list[Tensor] = []
        self._hooks: list[Any] = []
        self._computed = False
        grads = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout == torch.strided and parameter.requires_grad and gradient.numel():
                grads.append(gradient)
                owners.append(parameter)
            else:
                parameter.grad = None
        # Kept on the device: gradients that someone has zeroed in place are no one's loss.
        self._sizes = self._measured(grads)
        if grads:
            torch._foreach_zero_(local(grads))
        self._zeroed = dict(zip(owners, zip(grads, versions(grads), strict=True), strict=True))

    def __enter__(self) -> None:
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._zeroed]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None and self._zeroed and not self._computed and self._untouched() and self._matter():
            raise RuntimeError(REFUSAL)

    def _accumulated(self, parameter: Tensor) -> None:
        self._computed = True
        gradient, before = self._zeroed.pop(parameter, (None, 0))
        if gradient is None or parameter.grad is not gradient:
            return
        if versions([gradient]) == [before + 1] and self._matter():
            raise RuntimeError(REFUSAL)

    def _untouched(self) -> bool:
        """Whether the closure computed nothing; one that replays a CUDA graph writes without leaving a version."""
        here = [parameter.grad is gradient for parameter, (gradient, _) in self._zeroed.items()]
        return all(here) and not _any(self._measured([gradient for gradient, _ in self._zeroed.values()]))

    def _matter(self) -> bool:
        return _any(self._sizes)

    def _measured(self, grads: list[Tensor]) -> Sequence[Tensor]:
        """Sizes that are not zero if a gradient is not: on every rank the same, because all of them must refuse."""
        if not grads:
            return ()
        sharding = Sharding.of(grads)
        if sharding is None:
            return torch._foreach_norm(grads, 1)
        return sharding.sums(lambda parts: torch.stack(torch._foreach_norm(parts, 1)).sum(), local(grads))


def _any(sizes: Sequence[Tensor]) -> bool:
    return any(bool(size) for size in sizes)
