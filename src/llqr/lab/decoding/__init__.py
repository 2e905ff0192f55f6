"""From a trained decoder to sentences."""

from llqr.lab.decoding.beam import Hypothesis, beam_search
from llqr.lab.decoding.cache import Cache

__all__ = ["Cache", "Hypothesis", "beam_search"]
