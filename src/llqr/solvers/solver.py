"""What every inner solver offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from llqr.metric import Factors, Metric
from llqr.solvers.objective import Objective


@dataclass(frozen=True)
class SolverSettings:
    """What a solver is given beside the objective.

    Attributes:
        lr: step size; a tensor where a captured loop changes it between replays.
        momentum, clip: as in `llqr.Inner`.
        extrapolates: whether some steps will be extrapolated, so that products have to be remembered.
        fuse: run the steps of large stacks of matrices through `torch.compile`.
    """

    lr: float | Tensor = 1e-3
    momentum: float = 0.9
    clip: float = 5.0
    extrapolates: bool = False
    fuse: bool = False


class Solver(ABC):
    """Changes factors in place, with at most one product with `H` per step."""

    name: ClassVar[str]
    #: Whether all steps run the same kernels, so that they can be captured as CUDA graphs.
    capturable: ClassVar[bool] = False
    #: Whether a step can do with an extrapolated product.
    extrapolates: ClassVar[bool] = False
    #: Whether it knows the residual where it stands, so that the objective at the end needs no product.
    tracks_residual: ClassVar[bool] = False

    def __init__(self, metric: Metric, factors: list[Factors], settings: SolverSettings) -> None:
        self.check(metric)
        self.metric = metric
        self.factors = factors
        self.settings = settings

    @classmethod
    def check(cls, metric: Metric) -> None:
        """Refuse a metric that it cannot learn."""
        if objection := cls.objection(metric):
            raise ValueError(f"solver: {objection}; choose heavy-ball or adam")

    @classmethod
    def objection(cls, metric: Metric) -> str:
        """Why it cannot learn this metric; empty if it can."""
        return ""

    @abstractmethod
    def step(self, objective: Objective) -> Tensor:
        """One step with a product; returns the objective it started from."""

    def advance(self, objective: Objective) -> None:
        """One step with a product, without computing the objective."""
        self.step(objective)

    def extrapolate(self, objective: Objective) -> None:
        """One step without a product, from those before it."""
        raise NotImplementedError(f"solver: {self.name!r} makes a product in every step")

    def value(self, objective: Objective) -> Tensor:
        """The objective where it stands."""
        return objective.exact.at(self.factors).value

    def restart(self) -> None:
        """Forget the steps so far; captured loops start every refresh with this."""
        raise NotImplementedError(f"solver: {self.name!r} cannot be captured")
