"""Quadratic models of the loss at the current weights: `g` and `v -> H v`.

In reading order: `batch` (what a user gives), `problem` (model, loss and batch as a function of the weights),
`derivatives` (`J v` and `J^T u`), `divergence` (`Q`), `curvature` (`H v = J^T Q J v`, and which engine computes it),
`quadratic` (what a refresh learns from), `traced` (the engine "linearised") and `linearizer` (what a geometry holds).
"""

from llqr.curvature.batch import Batch, Loss, ShiftedCrossEntropy
from llqr.curvature.curvature import Curvature, choose_engine
from llqr.curvature.derivatives import ENGINES, Derivatives
from llqr.curvature.divergence import NEWTON, NGD, Divergence, OutputDivergence, divergence_named
from llqr.curvature.problem import Forward, Problem, frozen
from llqr.curvature.quadratic import Named, QuadraticModel

__all__ = [
    "ENGINES",
    "NEWTON",
    "NGD",
    "Batch",
    "Curvature",
    "Derivatives",
    "Divergence",
    "Forward",
    "Loss",
    "Named",
    "OutputDivergence",
    "Problem",
    "QuadraticModel",
    "ShiftedCrossEntropy",
    "choose_engine",
    "divergence_named",
    "frozen",
]
