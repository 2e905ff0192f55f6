"""Beam search with a trained decoder."""

from llqr.lab.models.decoding.beam import Hypothesis, beam_search
from llqr.lab.models.decoding.cache import Cache

__all__ = ["Cache", "Hypothesis", "beam_search"]
