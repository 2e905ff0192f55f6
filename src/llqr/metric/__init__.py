"""The learned inverse metric and its structures."""

from .block import Block
from .layout import StructureSpec
from .metric import Metric
from .structure import Factors, Flat, Stacked, Structure, Traced
from .structures import STRUCTURES

__all__ = ["STRUCTURES", "Block", "Factors", "Flat", "Metric", "Stacked", "Structure", "StructureSpec", "Traced"]
