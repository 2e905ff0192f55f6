"""Quadratic models of the loss: divergences, the frozen problem, and the engines that compute `H v`.

In reading order: `batch` and `losses` (what a user gives); `problem` (model, loss and batch as a function of the
weights), with `attached`, `writes`, `whole_weights` and `uncompiled`, which leave the model as it was; `quadratic`
(what a refresh learns from); `divergence`, `derivatives` and `curvature` (the mathematics of a product); `engine` and
`engines` (ways to compute it), of which `linearised` traces the product and `passes` uses FSDP's own passes.
`llqr.distributed.ranks` puts the models of several ranks together.
"""

from llqr.curvature.batch import Batch
from llqr.curvature.curvature import Curvature
from llqr.curvature.divergence import NEWTON, NGD, Divergence, OutputDivergence, divergence_named
from llqr.curvature.engine import Engine
from llqr.curvature.engines import ENGINES, choose_engine
from llqr.curvature.losses import Loss
from llqr.curvature.problem import Forward, Problem, frozen
from llqr.curvature.quadratic import Named, QuadraticModel
from llqr.distributed.ranks import RankError, Ranks

__all__ = [
    "ENGINES",
    "NEWTON",
    "NGD",
    "Batch",
    "Curvature",
    "Divergence",
    "Engine",
    "Forward",
    "Loss",
    "Named",
    "OutputDivergence",
    "Problem",
    "QuadraticModel",
    "RankError",
    "Ranks",
    "choose_engine",
    "divergence_named",
    "frozen",
]
