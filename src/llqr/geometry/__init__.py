"""What a user holds: the metric, the curvature it is learned from, and when.

In reading order: `geometry`; `runtime` (how a refresh is computed); `arguments` (what is refused at once); `batches`
(drawn by the geometry itself); `members` (the parameters that `U` acts on); `outcomes` and `summary` (how refreshes
went, in words). Besides: `fixed` (a metric that is not learned),
`protocol` (what the optimizer needs of a geometry) and `adapters` (losses).
"""

from llqr.curvature.linearizer import Linearizer
from llqr.geometry.adapters import ShiftedCrossEntropy
from llqr.geometry.fixed import FixedGeometry
from llqr.geometry.geometry import Geometry
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
