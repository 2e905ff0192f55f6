"""The weights that a spread refresh learns at, while training moves the model's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llqr.curvature import Problem
from llqr.curvature.batch import tensors_of


class WeightsCopy:
    """Copies of a problem's weights and buffers.

    Kept autograd graphs and captured ones read tensors in place, so that the copies stay where they are.
    """

    def __init__(self, problem: Problem) -> None:
        self._parameters = {name: parameter.clone() for name, parameter in problem.parameters.items()}
        self._others = [tensor.clone() for tensor in problem.fixed_tensors()]

    def refill(self, problem: Problem) -> None:
        """Copy again into the same memory, which captured graphs read."""
        torch._foreach_copy_(self._tensors(), [*problem.parameters.values(), *problem.fixed_tensors()])

    def place(self, problem: Problem) -> Problem:
        """The problem at the copies, on its own batch."""
        return problem.at(self._parameters, [*self._others, *tensors_of((problem.inputs, problem.targets))])

    def state(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [*self._parameters.values(), *self._others]


def at_saved(problem: Problem, saved: Sequence[Tensor]) -> Problem:
    """The problem at what `WeightsCopy.state` returned."""
    mine = [*problem.parameters.values(), *problem.fixed_tensors()]
    if [tensor.shape for tensor in saved] != [tensor.shape for tensor in mine]:
        raise ValueError("state_dict: saved in the middle of a refresh of a model with other parameters or buffers")
    placed = [tensor.to(own) for tensor, own in zip(saved, mine, strict=True)]
    count = len(problem.parameters)
    batch = tensors_of((problem.inputs, problem.targets))
    return problem.at(dict(zip(problem.parameters, placed, strict=False)), [*placed[count:], *batch])
