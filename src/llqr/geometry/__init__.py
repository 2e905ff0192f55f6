"""What a user holds: the metric, the curvature it is learned from, and when."""

from llqr.geometry.adapters import ShiftedCrossEntropy
from llqr.geometry.fixed import FixedGeometry
from llqr.geometry.geometry import Geometry
from llqr.geometry.linearizer import Linearizer
from llqr.geometry.protocol import GeometryLike
from llqr.geometry.runtime import Runtime
from llqr.refresh.report import Refresh, RefreshError, RefreshWarning

__all__ = [
    "FixedGeometry",
    "Geometry",
    "GeometryLike",
    "Linearizer",
    "Refresh",
    "RefreshError",
    "RefreshWarning",
    "Runtime",
    "ShiftedCrossEntropy",
]
