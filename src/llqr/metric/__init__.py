"""The learned inverse metric and its structures.

In reading order: `block` (the unit of `U`) and `layout` (from parameters to blocks, and from blocks to groups);
`structure` (what a structure must define), `stacked` and `flat` (how its blocks are stored), and one file per
structure, listed in `structures`; `metric` (all groups with their factors).
Used by these: `copying`, `packed`, `clipping` and `spectrum`. `llqr.distributed` shares a metric out among ranks.
"""

from llqr.metric.block import Block
from llqr.metric.flat import Flat
from llqr.metric.layout import StructureSpec
from llqr.metric.metric import Metric
from llqr.metric.stacked import Stacked
from llqr.metric.structure import Bounds, Factors, Structure
from llqr.metric.structures import STRUCTURES

__all__ = ["STRUCTURES", "Block", "Bounds", "Factors", "Flat", "Metric", "Stacked", "Structure", "StructureSpec"]
