"""A refresh in progress: an inner loop that can be left and taken up again, and the weights it stands at meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.curvature import Batch, Problem, QuadraticModel
from llqr.curvature.problem import split_batch, tensors_of
from llqr.solvers.solve import Solution


class Loop(Protocol):
    """An inner loop, a step at a time, at most one product with `H` in each; the last only reads the objective."""

    @property
    def curvature(self) -> QuadraticModel: ...
    @property
    def total(self) -> int: ...
    @property
    def done(self) -> int: ...
    def advance(self) -> None: ...
    def solution(self) -> Solution: ...


class Standstill:
    """Copies of the weights and buffers at one moment.

    Kept graphs and captured ones read tensors in place, and training moves the model's own between two products.
    """

    def __init__(self, problem: Problem) -> None:
        self._parameters = {name: parameter.clone() for name, parameter in problem.parameters.items()}
        self._others = [tensor.clone() for tensor in problem.standing()]

    def refill(self, problem: Problem) -> None:
        """Copy again into the same memory, where captured graphs look."""
        torch._foreach_copy_(self._tensors(), [*problem.parameters.values(), *problem.standing()])

    def hold(self, problem: Problem) -> Problem:
        """The problem at the copies, on its own batch."""
        return problem.at(self._parameters, [*self._others, *tensors_of((problem.inputs, problem.targets))])

    def state(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [*self._parameters.values(), *self._others]


@dataclass
class Progress:
    """A refresh that began at `step` and is to be finished before `until`, when the next one begins.

    Attributes:
        batch: what it learns from; a copy while it is spread, because a training loop may reuse its batch's memory.
        loop: None until the first product, and again after loading: what was done is then done again, which needs no
            solver's memory in the state and gives the same factors.
        seconds: spent so far.
    """

    step: int
    until: int
    batch: Batch
    loop: Loop | None = None
    seconds: float = 0.0

    def up_to_date(self, step: int) -> bool:
        """Whether the inner steps owed before this optimizer step are done: an even share of all for every one."""
        if self.loop is None:
            return False
        shares, period = step - self.step + 1, self.until - self.step
        return self.loop.done >= min(self.loop.total, self.loop.total * shares // period)

    def state(self) -> dict[str, Any]:
        """Tensors that were on the CPU are told apart: those stay there, the others follow the model."""
        beside = [tensor.device.type != "cpu" for tensor in tensors_of(self.batch)]
        return {"step": self.step, "until": self.until, "batch": self.batch, "beside_model": beside}

    @classmethod
    def of(cls, state: Mapping[str, Any], device: torch.device) -> Progress:
        beside = iter(state["beside_model"])
        batch = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(device) if next(beside) else tensor, state["batch"]
        )
        return cls(int(state["step"]), int(state["until"]), batch)

    def __getstate__(self) -> dict[str, Any]:
        """Without the loop, whose graphs cannot be copied."""
        return self.__dict__ | {"loop": None}


def at_saved(problem: Problem, saved: Sequence[Tensor]) -> Problem:
    """The problem at what `Standstill.state` gave."""
    mine = [*problem.parameters.values(), *problem.standing()]
    if [tensor.shape for tensor in saved] != [tensor.shape for tensor in mine]:
        raise ValueError("state_dict: saved in the middle of a refresh of a model with other parameters or buffers")
    moved = [tensor.to(own) for tensor, own in zip(saved, mine, strict=True)]
    count = len(problem.parameters)
    batch = tensors_of((problem.inputs, problem.targets))
    return problem.at(dict(zip(problem.parameters, moved, strict=False)), [*moved[count:], *batch])


def copied(batch: Batch) -> Batch:
    """The batch in memory of its own, as plain (inputs, targets)."""
    pair: tuple[Any, Any] = pytree.tree_map_only(Tensor, torch.clone, split_batch(batch))
    return pair
