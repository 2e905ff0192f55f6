"""The exact layerwise LQR of a small sequential network: the reference for every approximation.

    linearise  ->  costs  ->  solve            A_i, B_i   ->   Q_i, R_i, M_i, Q_N   ->   Riccati step
                     |
                     +---->  relaxed_objective     J of a given δθ, such as -U g

`exact_step` does the first line in one call. Everything is dense and meant for problems of a few thousand dimensions.
"""

from llqr.lqr.cost_blocks import LayerwiseLQR, StageBlocks, costs
from llqr.lqr.linearisation import Linearisation, LinearStage, linearise
from llqr.lqr.riccati import NoMinimiserError, StagePolicy, exact_step, relaxed_objective, riccati, solve

__all__ = [
    "LayerwiseLQR",
    "LinearStage",
    "Linearisation",
    "NoMinimiserError",
    "StageBlocks",
    "StagePolicy",
    "costs",
    "exact_step",
    "linearise",
    "relaxed_objective",
    "riccati",
    "solve",
]
