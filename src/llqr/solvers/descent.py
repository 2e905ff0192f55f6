"""First-order inner solvers: heavy ball (the paper's) and Adam, through `torch.optim`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from llqr.metric import Factors, Metric
from llqr.metric.clipping import clip
from llqr.metric.structure import flattened
from llqr.solvers.extrapolation import Extrapolation
from llqr.solvers.fused_descent import descend, is_fused
from llqr.solvers.objective import Evaluation, Objective
from llqr.solvers.solver import Solver, SolverSettings


class Descent(Solver):
    """A first-order method of `torch.optim` on the factors, with at most one product with `H` per step."""

    capturable = True
    extrapolates = True
    #: Whether large stacks are stepped here, in fused kernels, and not by torch's optimizer.
    fuses: ClassVar[bool] = False

    def __init__(self, metric: Metric, factors: list[Factors], settings: SolverSettings) -> None:
        super().__init__(metric, factors, settings)
        flat = flattened(factors)
        self.optimizer = self._optimizer(flat, on_cuda=all(factor.is_cuda for factor in flat))
        fuse = self.fuses and settings.fuse
        self._momenta: list[Factors] = [
            {name: torch.zeros_like(factor) for name, factor in own.items() if fuse and is_fused(group, factor)}
            for group, own in zip(metric.groups, factors, strict=True)
        ]
        self._products = Extrapolation(metric.quick_dot) if settings.extrapolates else None

    @abstractmethod
    def _optimizer(self, factors: Sequence[Tensor], on_cuda: bool) -> torch.optim.Optimizer: ...

    def restart(self) -> None:
        if self._products is not None:
            self._products.forget()
        for memory in (*self.optimizer.state.values(), *self._momenta):
            for value in memory.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def step(self, objective: Objective) -> Tensor:
        here = objective.at(self.factors, self._products)
        self._move(here)
        return here.value

    def advance(self, objective: Objective) -> None:
        self._move(objective.at(self.factors, self._products))

    def extrapolate(self, objective: Objective) -> None:
        assert self._products is not None
        self._move(objective.extrapolated(self.factors, self._products))

    def _move(self, here: Evaluation) -> None:
        """A step down the slopes. Entries that are not finite count as zero."""
        slopes = here.slopes(self._step_fused)
        if not any(slopes):
            return
        clipped = clip(self.metric.groups, slopes, self.settings.clip, here.objective.side_by_side)
        for own, gradients in zip(self.factors, clipped, strict=True):
            for name, gradient in gradients.items():
                own[name].grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()  # frees the gradients, which would lie beside the activations in the next product

    def _step_fused(self, i: int, slopes: Factors) -> Factors:
        """Step those factors of a group that are stepped here; returns the finite slopes of the others."""
        settings, momenta = self.settings, self._momenta[i]
        for name, momentum in momenta.items():
            descend(self.factors[i][name], momentum, slopes[name], settings.clip, settings.lr, settings.momentum)
        rest = {name: slope for name, slope in slopes.items() if name not in momenta}
        return {name: slope.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for name, slope in rest.items()}


class HeavyBall(Descent):
    """`m <- momentum m + clip(grad)`, `F <- F - lr m`: exactly torch's SGD with momentum."""

    name = "heavy-ball"
    fuses = True

    def _optimizer(self, factors: Sequence[Tensor], on_cuda: bool) -> torch.optim.Optimizer:
        settings = self.settings
        return torch.optim.SGD(factors, lr=settings.lr, momentum=settings.momentum, fused=on_cuda)


class Adam(Descent):
    """torch's Adam on the clipped gradients."""

    name = "adam"

    def _optimizer(self, factors: Sequence[Tensor], on_cuda: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(factors, lr=self.settings.lr, capturable=on_cuda, fused=on_cuda)
