"""The learned inverse metric and its structures.

In reading order: `layout` (from parameters to blocks), `structure` (what a structure must define, and how its blocks
are stored), one file per structure such as `ekfac`, `structures` (which block gets which structure) and `metric` (all
groups with their factors). `llqr.distributed` shares a metric out among ranks.
"""

from llqr.metric.layout import Block
from llqr.metric.metric import Metric
from llqr.metric.structure import Bounds, Factors, Flat, Structure
from llqr.metric.structures import STRUCTURES, StructureSpec

__all__ = ["STRUCTURES", "Block", "Bounds", "Factors", "Flat", "Metric", "Structure", "StructureSpec"]
