"""Geometry-aware sharpness minimization for PyTorch: LLQR, the SAM family, and LLQR+SAM."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llqr.curvature import ENGINES, Divergence, OutputDivergence, QuadraticModel, ShiftedCrossEntropy
    from llqr.geometry import FixedGeometry, Geometry
    from llqr.inner import SOLVERS, Inner
    from llqr.metric import STRUCTURES, Block, Flat, Metric, Structure
    from llqr.probes import PROBES, ASAMProbe, FisherSAMProbe, FriendlySAMProbe, SAMProbe
    from llqr.report import Refresh, RefreshError, RefreshWarning
    from llqr.runtime import Runtime
    from llqr.sam import ASAM, LLQR, LLQRSAM, SAM, FisherSAM, FriendlySAM, Optimizer, build, method_names

__version__ = "1.0.0"

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
    "Structure",
    "build",
    "method_names",
]

if not TYPE_CHECKING:
    #: In the order of what they import: `llqr.SAM` needs no metric and no curvature.
    HOMES = ("probes", "sam", "metric", "curvature", "inner", "geometry")

    def __getattr__(name):
        """Import a part of the library when one of its names is first used: `llqr --help` must not wait for torch."""
        if name not in {*__all__, *HOMES}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        names = globals()
        for home in HOMES:
            found = vars(import_module(f"{__name__}.{home}"))
            names.update({known: found[known] for known in __all__ if known in found})
            if name in names:
                return names[name]

    def __dir__():
        return sorted({*globals(), *__all__})
