"""The learned inverse metric and its structures."""

from llqr.metric.block import Block
from llqr.metric.layout import StructureSpec
from llqr.metric.metric import Metric
from llqr.metric.structure import Factors, Flat, Stacked, Structure, Traced
from llqr.metric.structures import STRUCTURES

__all__ = ["STRUCTURES", "Block", "Factors", "Flat", "Metric", "Stacked", "Structure", "StructureSpec", "Traced"]
