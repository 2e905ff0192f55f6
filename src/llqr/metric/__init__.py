"""The learned inverse metric and its structures."""

from llqr.metric.block import Block
from llqr.metric.flat import Flat
from llqr.metric.layout import StructureSpec
from llqr.metric.metric import Metric
from llqr.metric.stacked import Stacked
from llqr.metric.structure import Bounds, Factors, Structure
from llqr.metric.structures import STRUCTURES

__all__ = ["STRUCTURES", "Block", "Bounds", "Factors", "Flat", "Metric", "Stacked", "Structure", "StructureSpec"]
