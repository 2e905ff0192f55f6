"""Quadratic models of the loss: divergences, the frozen problem, and the engines that compute `H v`."""

from .curvature import Curvature, choose_engine
from .distributed import QuadraticModel, RankAverage, several_ranks
from .divergence import NEWTON, NGD, Divergence, OutputDivergence, divergence_named
from .problem import Batch, Forward, Loss, Problem, frozen
from .traced import LINEARISED, Trace

__all__ = [
    "LINEARISED",
    "NEWTON",
    "NGD",
    "Batch",
    "Curvature",
    "Divergence",
    "Forward",
    "Loss",
    "OutputDivergence",
    "Problem",
    "QuadraticModel",
    "RankAverage",
    "Trace",
    "choose_engine",
    "divergence_named",
    "frozen",
    "several_ranks",
]
