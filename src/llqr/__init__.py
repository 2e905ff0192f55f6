"""Geometry-aware sharpness minimization for PyTorch: LLQR, the SAM family, and LLQR+SAM."""

from llqr.curvature import ENGINES, Divergence, OutputDivergence, QuadraticModel
from llqr.geometry import (
    FixedGeometry,
    Geometry,
    Refresh,
    RefreshError,
    RefreshWarning,
    Runtime,
    ShiftedCrossEntropy,
)
from llqr.methods import ASAM, LLQR, LLQRSAM, SAM, FisherSAM, FriendlySAM, build, method_names
from llqr.metric import STRUCTURES, Block, Flat, Metric, Stacked, Structure
from llqr.optimizer import Optimizer
from llqr.probes import PROBES, ASAMProbe, FisherSAMProbe, FriendlySAMProbe, SAMProbe
from llqr.solvers import SOLVERS, Inner
from llqr.step.state_split import joined_state, split_state

__version__ = "0.1.0"

__all__ = [
    "ASAM",
    "ENGINES",
    "LLQR",
    "LLQRSAM",
    "PROBES",
    "SAM",
    "SOLVERS",
    "STRUCTURES",
    "ASAMProbe",
    "Block",
    "Divergence",
    "FisherSAM",
    "FisherSAMProbe",
    "FixedGeometry",
    "Flat",
    "FriendlySAM",
    "FriendlySAMProbe",
    "Geometry",
    "Inner",
    "Metric",
    "Optimizer",
    "OutputDivergence",
    "QuadraticModel",
    "Refresh",
    "RefreshError",
    "RefreshWarning",
    "Runtime",
    "SAMProbe",
    "ShiftedCrossEntropy",
    "Stacked",
    "Structure",
    "build",
    "joined_state",
    "method_names",
    "split_state",
]
