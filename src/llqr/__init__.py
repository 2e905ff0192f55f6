"""Geometry-aware sharpness minimization for PyTorch: LLQR, the SAM family, and LLQR+SAM."""

from llqr.curvature import Divergence, OutputDivergence
from llqr.geometry import FixedGeometry, Geometry, Refresh, RefreshError, RefreshWarning
from llqr.methods import ASAM, LLQR, LLQRSAM, SAM, FisherSAM, FriendlySAM, build, method_names
from llqr.metric import STRUCTURES, Block, Flat, Metric, Stacked, Structure
from llqr.optimizer import Optimizer
from llqr.probes import ASAMProbe, FisherSAMProbe, FriendlySAMProbe, SAMProbe
from llqr.solvers.solve import Inner

__version__ = "0.1.0"

__all__ = [
    "ASAM",
    "LLQR",
    "LLQRSAM",
    "SAM",
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
    "Refresh",
    "RefreshError",
    "RefreshWarning",
    "SAMProbe",
    "Stacked",
    "Structure",
    "build",
    "method_names",
]
