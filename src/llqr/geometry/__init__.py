"""What a user holds: the metric, the curvature it is learned from, and when."""

from llqr.geometry.fixed import FixedGeometry
from llqr.geometry.geometry import Geometry, GeometryLike
from llqr.refresh.report import Refresh, RefreshError, RefreshWarning

__all__ = ["FixedGeometry", "Geometry", "GeometryLike", "Refresh", "RefreshError", "RefreshWarning"]
