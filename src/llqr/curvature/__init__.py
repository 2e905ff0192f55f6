"""Quadratic models of the loss: divergences, the frozen problem, and the engines that compute `H v`."""

from llqr.curvature.curvature import Curvature, choose_engine
from llqr.curvature.divergence import NEWTON, NGD, Divergence, OutputDivergence, divergence_named
from llqr.curvature.linearised import LINEARISED, Trace
from llqr.curvature.problem import Batch, Forward, Loss, Problem, frozen
from llqr.curvature.ranks import QuadraticModel, RankAverage, several_ranks

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
